"""`advise`: a few minutes of a user's own training say whether pruning pays there, and how.

Begin with `advice`. `trial` trains copies, `timing` measures steps, `evidence` is what is known about accuracy, and
`recommend` is the rule.
"""

from __future__ import annotations

from .advice import Advice, advise

__all__ = ["Advice", "advise"]
