"""What a batch is: nested values with one part per sample, cut to some samples, and passed to the model.

Begin with `batch`. Imports nothing of halfway but `settings`.
"""
