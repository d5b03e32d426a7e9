"""Decided before a sample is loaded: batches that leave the data loader already pruned.

Begin with `pruned_batches`; `epoch` is what was decided in this epoch, `feedback` takes what training shows, and
`reports` keep it until it is learned. Imports selectors, samplers, `state`, and of the engine what watches a layer; no
model is run here.
"""
