"""The blocker in trainers that have a loop of their own. One module per trainer, imported only by its users.

    from halfway.integrations.lightning import ForwardBlocking
    from halfway.integrations.transformers import BlockingMixin
    from halfway.integrations.accelerate import block

None of them is needed for a loop of your own, and none is imported with `halfway`. Begin with `accelerate`, the
shortest; modules with an underscore are shared.
"""
