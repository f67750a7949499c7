"""`ChildCalls`: lets the children of a wrapped model be called outside of the model's forward.

With manual optimization, `training_step` does not run as a forward, because it runs backwards and updates itself. It
calls the model (`self(batch)`) or its children (`self.generator(noise)`). A call of a child must unshard the root's
groups and enter autocast, as the root's forward does. So each child gets a subclass of its class, whose `__call__` runs
inside a registered forward method of the root.
"""

from typing import Any

from torch import nn

from zeroamp.wrapping.state import wrap_state
from zeroamp.wrapping.wrap import register_forward_method

_METHOD = "_zeroamp_call_child"


class ChildCalls:
    """Lets the direct children of a wrapped model be called outside of the model's forward, until `remove`."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._children: list[tuple[nn.Module, type[nn.Module]]] = []
        state = wrap_state(root)
        held = {id(holder) for holder in state.holders.values()}
        object.__setattr__(root, _METHOD, _call_child)
        register_forward_method(root, _METHOD)
        for child in root.children():
            if id(child) not in held and any(True for _ in child.parameters()):
                self._children.append((child, type(child)))
                child.__class__ = _calling_through(root, type(child))

    def remove(self) -> None:
        """Restore the classes of the children."""
        for child, cls in self._children:
            child.__class__ = cls
        self._children.clear()
        vars(self._root).pop(_METHOD, None)


def _call_child(child: nn.Module, cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return cls.__call__(child, *args, **kwargs)


def _calling_through(root: nn.Module, cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `cls` whose call goes through the root, unless the root's forward is running."""
    state = wrap_state(root)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if state.root_forward.depth > 0:
            return cls.__call__(self, *args, **kwargs)
        return getattr(root, _METHOD)(self, cls, args, kwargs)

    return type(cls.__name__, (cls,), {"__call__": call})
