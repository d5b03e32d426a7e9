"""Experiments, and the `halfway` command: everything that needs more than torch. Nothing else imports this room.

Begin with `commands`, a file per command. `recipes`, `data` and `models` say what is trained, `training` trains it,
`comparison` trains several side by side, `report` writes a page about them, and `bench` measures single steps.
"""
