"""Labels in the traces of `torch.profiler`. A label names the FSDP unit or parameter group, and the dtype it sends.

| label | what |
|---|---|
| `zeroamp::all_gather (blocks.0 bf16)` | the all-gather of one group |
| `zeroamp::reduce_scatter (blocks.0 bf16)` | the reduction of one group's gradients over shards |
| `zeroamp::all_reduce (blocks.0 fp32)` | their sum over replicas, if it is in the order of the tree |
| `zeroamp::backward`, `norm`, `clip`, `optimizer (AdamW)` | the parts of an optimizer step |
| `zeroamp::forward (blocks.0)` | a unit's forward, without unshard and reshard: inside `zeroamp.Profile` |
| `zeroamp::recompute (blocks.0)` | a forward that activation checkpointing repeats in the backward: there too |

FSDP2's own labels (`FSDP::...`) are in the trace too. `torch.autograd.profiler.emit_nvtx` sends all of them to Nsight.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import is_in_backward, is_profiling, untraced
from zeroamp.policies.dtypes import short_name

LABEL_PREFIX = "zeroamp::"
"""Prefix of the name of each label."""

LabelKind = Literal[
    "all_gather", "all_reduce", "backward", "clip", "forward", "norm", "optimizer", "recompute", "reduce_scatter"
]

_NOTHING: AbstractContextManager[Any] = nullcontext()


def label(kind: LabelKind, of: str = "", dtype: torch.dtype | None = None) -> AbstractContextManager[Any]:
    """Return a context that a trace shows as `zeroamp::{kind} ({of} {dtype})`.

    Without a profiler that records, the context does nothing and the name is not made.
    """
    if not is_profiling():
        return _NOTHING
    what = of if dtype is None else f"{of} {short_name(dtype)}"
    return record_function(f"{LABEL_PREFIX}{kind} ({what})" if what else f"{LABEL_PREFIX}{kind}")


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
