"""Experiments and the `halfway` command: everything that needs more than torch. No other room imports this one.

Begin with `commands`, a file per command. `recipes`, `data` and `models` define what is trained, `training` trains it,
`comparison` trains several methods side by side, `coresets` chooses subsets for them, `study` runs many arms from one
file, `report` writes pages, and `bench` measures single steps.
"""
