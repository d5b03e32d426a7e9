"""Recipes: everything one training needs to know, in a small YAML file beside this one.

`schema` reads them, `methods` knows the methods by name, `predicted_cost` what they will cost.
"""
