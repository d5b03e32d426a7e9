"""The blocker where somebody else writes the loop. One module per trainer, each imported by whoever uses it.

    from halfway.integrations.lightning import ForwardBlocking
    from halfway.integrations.transformers import BlockingMixin
    from halfway.integrations.accelerate import block

None of them is needed for a loop of your own, and none is imported with `halfway`.
"""
