"""What is learned during training and is the same on all ranks: the density, a linear head, what is known about each
sample.

Begin with `estimator`. Selectors and samplers hold it, `online_head` and `sample_memory`; through `ranks` the processes
agree; `files` is how states are written, `flags` and `host_copy` bring values from the device without a wait.
"""
