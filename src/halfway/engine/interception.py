"""Taking the place of a module's method for a while.

Not a hook: copies and pickles of a module take its hooks along. A stand-in can say what a copy gets instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import nn

Handler = Callable[[Callable[..., Any], Any, Any], Any]


class Interception:
    """Calls `handler(original, args, kwargs)` instead of `module.name(*args, **kwargs)`, until `remove`.

    Copies and pickles of the module get the original method.

    Attributes:
        original: the method it stands in for.
    """

    def __init__(self, module: nn.Module, name: str, handler: Handler) -> None:
        self._module = module
        self._name = name
        self._handler = handler
        self._patched = vars(module).get(name)
        self.original = getattr(module, name)
        vars(module)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handler(self.original, args, kwargs)

    def remove(self) -> None:
        """Give the method back."""
        if vars(self._module).get(self._name) is not self:
            return
        if self._patched is None:
            del vars(self._module)[self._name]
        else:
            vars(self._module)[self._name] = self._patched

    def __enter__(self) -> Interception:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> Any:
        if self._patched is not None:
            return operator.itemgetter(0), ((self._patched,),)
        # When this is undone, the copy exists but has no attributes yet: it finds its class's method.
        return getattr, (self._module, self._name)
