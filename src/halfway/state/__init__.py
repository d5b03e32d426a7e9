"""What is learned during training and is the same on all ranks: the density, and what is known about each sample.

Begin with `estimator`. Selectors and samplers hold it and `sample_memory`; through `ranks` the processes agree.
"""
