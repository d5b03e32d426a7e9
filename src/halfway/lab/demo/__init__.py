"""`halfway demo`: handwritten digits, trained by a few methods beside each other."""
