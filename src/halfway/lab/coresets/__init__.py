"""Coresets of a recipe: proxies are trained, a subset is chosen and kept in a file, and a training takes it from there.

Begin with `choose`, which does all of it; `proxies` says which trainings a method needs, `evidence` what is measured on
them, `chosen` how a training uses the file.
"""
