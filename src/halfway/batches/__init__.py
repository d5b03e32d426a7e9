"""Batches: nested values with one part per sample. How they are cut to some samples and passed to the model.

Begin with `batch`. Imports nothing from halfway but `settings`.
"""
