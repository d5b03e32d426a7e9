"""Recipes: everything one training needs to know, in a small YAML file beside this one.

`schema` says what they hold, `reading` reads them, `methods` lists the methods by name, `predicted_cost` predicts what
they will cost.
"""
