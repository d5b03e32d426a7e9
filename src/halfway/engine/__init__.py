"""Make the model's next call reuse what a look at all samples has computed.

Begin with the essay in `tape`. `cut` is the place, `probe` runs the model up to it, `engine` recognises the model's
next call (`pending`), `replay` answers its operations from the tape, as `plan` decides, or `fallbacks` says why not.
`proof`, with `rehearsal` and `axis`, shows once that a replay is right; `spot_checks` look again. `sandbox` and
`footprint`, with `walk` and `containers`, leave no trace. What is known of operations is in `ops` and `plain`, of
PyTorch's own ways in `autocast`, `batch_norm`, `interception` and `sharding`; `flops` counts.
Knows no selector: it imports `batches` and nothing above.
"""
