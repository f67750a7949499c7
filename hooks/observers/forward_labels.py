"""Labels the forwards of modules in traces: see `trace_labels.py`."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import is_in_backward, untraced
from zeroamp.hooks.observers.trace_labels import label


def label_forwards(module: nn.Module, fqn: str) -> list[RemovableHandle]:
    """Label the forwards of `module` by its FQN, the root's by "root", until the handles are removed.

    Call after all other hooks of the module were registered. The label then begins after the unshard and ends before
    the reshard. With `always_call` it also ends when the forward raises. Inputs and outputs are not changed.
    """
    labels: list[AbstractContextManager[Any]] = []  # that have begun

    @untraced
    def begin(_module: nn.Module, _args: Any) -> None:
        labels.append(label("recompute" if is_in_backward() else "forward", fqn or "root"))
        labels[-1].__enter__()

    @untraced
    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        if labels:  # an earlier hook may have raised before `begin`
            labels.pop().__exit__(None, None, None)

    return [
        module.register_forward_pre_hook(begin),
        module.register_forward_hook(end, prepend=True, always_call=True),
    ]
