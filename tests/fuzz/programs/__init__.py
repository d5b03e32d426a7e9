"""Random small programs for the fuzz test, and what training on the retained samples should do to them.

A program is a list of steps on feature maps (N, C, H, W). Each step is a module that runs in one of two ways: plainly,
or as the engine documents a replay, with explicit side information from a first pass over *all* samples: the draws
they had, and the statistics of a BatchNorm none of whose input depends on other samples. Whatever does depend on other
samples of the batch is computed from the retained ones in both ways. So the second way shares nothing with the engine
but the definition.

- `base`: the notes of the first pass, and what all steps have in common
- `ordinary`: convolutions, attention, in-place operations, BatchNorm, residual branches
- `mixing`: samples see each other, or change places
- `draws`: every operation of PyTorch that draws random numbers
- `folds`: pooling, dropout and the like while samples lie elsewhere than in front
- `reads`: the program goes one way or the other by a value it reads on the host
- `state`: what a forward pass leaves behind in a module; hooks and layers that it makes when it first runs
- `program`: puts steps together
"""

from .base import CHANNELS, Note, Step
from .program import FAMILIES, Program, every_kind, make_step

__all__ = ["CHANNELS", "FAMILIES", "Note", "Program", "Step", "every_kind", "make_step"]
