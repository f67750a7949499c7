"""Finds weights of which the model reads the dtype and computes something else with it, for `Ledger.verify`.

`x.to(self.proj.weight.dtype)` casts `x` to bf16 if the weight is all-gathered in bf16, and to fp32 under
`torch.autocast` of one process. Many models read a dtype and nothing follows from it: the cast is the one that autocast
makes for the next op. Two forwards decide. In the second one, the reads are answered as autocast answers them.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zeroamp.hooks.observers.observed_dtypes import Observations
from zeroamp.hooks.tensors import tensors_in
from zeroamp.ledger.observed_step import ObservedStep, call, leaves_no_trace
from zeroamp.planning.plan import Plan
from zeroamp.policies.dtypes import short_name
from zeroamp.wrapping.state import WrapState

_HOOKS = ("torch.distributed.", "zeroamp.")
"""Beginnings of the names of modules whose hooks run inside of the forward. Their reads of a dtype are not the model's.
"""


def differing_reads(plan: Plan, model: nn.Module, state: WrapState, batch: object) -> list[str]:
    """Return a sentence for each weight whose dtype the model reads, if the stored dtype gives another output.

    Runs the forward two or three times, without a backward. All ranks call this. Leaves no trace on the model.
    """
    if plan.policy.mode != "autocast":
        return []
    reads = StoredDtypes(plan, state.root)

    step = ObservedStep(state, Observations())

    def outputs() -> list[torch.Tensor]:
        try:
            with leaves_no_trace(state), torch.compiler.set_stance("force_eager"):
                return [tensor.detach().clone() for tensor in tensors_in(call(model, batch))]
        finally:
            step.abandon()  # no backward follows

    as_trained = outputs()
    with reads:
        as_autocast = outputs()
    sharded: list[str] = []
    if reads.found_sharded and plan.policy.stage < 3:  # at stage 3 the next forward finds it sharded again
        reads.as_unsharded = True
        with reads:
            later = outputs()
        if not _are_equal(as_autocast, later):
            sharded = [
                f"{fqn}: the model reads the dtype of this weight outside of its unit. It is {short_name(stored)} "
                f"while the weight is sharded and {short_name(dtype)} while it is unsharded, so outputs depend on the "
                f'stage and on earlier forwards. Set lower_precision_safe_modules to "auto", or "param": '
                f'"{short_name(stored)}" for {fqn} in zeroamp.overrides.'
                for fqn, (dtype, stored) in reads.found_sharded.items()
            ]
    if _are_equal(as_trained, as_autocast):
        return sharded
    return sharded + [
        f"{fqn}: the model reads the dtype of this weight, which is {short_name(dtype)} here and "
        f"{short_name(stored)} under torch.autocast of one process, and its output differs. Set "
        f'lower_precision_safe_modules to "auto", or "param": "{short_name(stored)}" for {fqn} in zeroamp.overrides.'
        for fqn, (dtype, stored) in reads.found.items()
    ]


class StoredDtypes(TorchFunctionMode):
    """Answers `weight.dtype` with the dtype in which the weight is stored, and records the reads."""

    def __init__(self, plan: Plan, root: nn.Module) -> None:
        super().__init__()
        self._stored = {fqn: param.dtypes.stored for param in plan.params for fqn in (param.fqn, *param.aliases)}
        self._unsharded = {fqn: param.dtypes.param for param in plan.params for fqn in (param.fqn, *param.aliases)}
        self._root = root
        self.as_unsharded = False
        """Whether reads of a sharded weight return the dtype that the weight has while it is unsharded."""
        self.found: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """FQN -> dtype of the unsharded weight, dtype in which it is stored; in the order of the reads."""
        self.found_sharded: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """The same, of weights that are sharded at the read."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, or return the stored dtype for a weight's `dtype` that the model reads."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.dtype) and isinstance(args[0], nn.Parameter) and _is_read_by_model():
            for fqn, parameter in self._root.named_parameters():
                if parameter is not args[0]:
                    continue
                stored, unsharded = self._stored.get(fqn, result), self._unsharded.get(fqn, result)
                if stored != result:
                    self.found.setdefault(fqn, (result, stored))
                    return unsharded if self.as_unsharded and fqn in self.found_sharded else stored
                if unsharded != result:
                    self.found_sharded.setdefault(fqn, (unsharded, stored))
                    return unsharded if self.as_unsharded else result
        return result


def _is_read_by_model() -> bool:
    """Return whether the function that a `__torch_function__` runs was called outside of FSDP2 and zeroamp."""
    frame = inspect.currentframe()
    for _ in range(2):  # from here to __torch_function__, and to its caller
        frame = frame.f_back if frame else None
    return frame is not None and not f"{frame.f_globals.get('__name__')}.".startswith(_HOOKS)


def _are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Return whether two outputs have the same dtypes, shapes and values, where NaN equals NaN."""
    return [(tensor.dtype, tensor.shape) for tensor in first] == [
        (tensor.dtype, tensor.shape) for tensor in second
    ] and all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(first, second, strict=True))
