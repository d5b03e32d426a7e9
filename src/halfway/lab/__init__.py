"""Experiments: what needs more than torch. Nothing in the core imports this."""
