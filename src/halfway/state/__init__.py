"""What is learned during a training, and is the same on all ranks: the density, what is known of each sample.

Begin with `estimator`. It and `sample_memory` are held by selectors and samplers; `ranks` is how processes agree.
"""
