"""The blocker in trainers that have their own loop. One module per trainer, imported only by its users.

    from halfway.integrations.lightning import ForwardBlocking
    from halfway.integrations.transformers import BlockingMixin
    from halfway.integrations.accelerate import block

A hand-written loop needs none of them, and `import halfway` imports none. Begin with `accelerate`, the shortest;
modules with an underscore are shared.
"""
