"""Finds weights of which the model reads the dtype and computes something else with it, for `Ledger.verify`.

`x.to(self.proj.weight.dtype)` casts `x` to bf16 if the weight is all-gathered in bf16, and to fp32 under
`torch.autocast` of one process. Many models read a dtype and nothing follows from it: the cast is the one that autocast
makes for the next op. Two forwards decide. In the second one, the reads are answered as autocast answers them.
"""

from typing import Any

import torch
from torch import nn

from zeroamp.hooks.observers.observed_dtypes import Observations
from zeroamp.hooks.observers.tracing import DtypeReads
from zeroamp.hooks.tensors import tensors_in
from zeroamp.ledger.observed_step import ObservedStep, call, leaves_no_trace
from zeroamp.planning.group_dtypes import ParamDtypes
from zeroamp.planning.plan import Plan
from zeroamp.policies.dtypes import short_name
from zeroamp.wrapping.state import WrapState


def differing_reads(plan: Plan, model: nn.Module, state: WrapState, batch: object) -> list[str]:
    """Return a sentence for each weight whose dtype the model reads, if the stored dtype gives another output.

    Runs the forward two or three times, without a backward. All ranks call this. Leaves no trace on the model.
    """
    if plan.policy.mode != "autocast":
        return []
    reads = StoredDtypes(state)
    step = ObservedStep(state, Observations())

    def outputs() -> list[torch.Tensor]:
        try:
            with leaves_no_trace(state), torch.compiler.set_stance("force_eager"):
                return [tensor.detach().clone() for tensor in tensors_in(call(model, batch))]
        finally:
            step.abandon()  # no backward follows

    as_trained = outputs()
    with DtypeReads(reads.answer):
        as_autocast = outputs()
    sharded: list[str] = []
    if reads.found_sharded and plan.policy.stage < 3:  # at stage 3 the next forward finds it sharded again
        reads.as_unsharded = True
        with DtypeReads(reads.answer):
            later = outputs()
        if not _are_equal(as_autocast, later):
            sharded = [
                f"{fqn}: the model reads the dtype of this weight outside of its unit. It is "
                f"{short_name(dtypes.stored)} while the weight is sharded and {short_name(dtypes.param)} while it is "
                "unsharded, so outputs depend on the stage and on earlier forwards. Set lower_precision_safe_modules "
                f'to "auto", or "param": "{short_name(dtypes.stored)}" for {fqn} in zeroamp.overrides.'
                for fqn, dtypes in reads.found_sharded.items()
            ]
    if _are_equal(as_trained, as_autocast):
        return sharded
    return sharded + [
        f"{fqn}: the model reads the dtype of this weight, which is {short_name(dtypes.param)} here and "
        f"{short_name(dtypes.stored)} under torch.autocast of one process, and its output differs. Set "
        f'lower_precision_safe_modules to "auto", or "param": "{short_name(dtypes.stored)}" for {fqn} in '
        "zeroamp.overrides."
        for fqn, dtypes in reads.found.items()
    ]


class StoredDtypes:
    """Answers the model's reads of a weight's dtype with the dtype in which it is stored, and records the reads."""

    def __init__(self, state: WrapState) -> None:
        self._state = state
        self._dtypes = {fqn: param.dtypes for param in state.plan.params for fqn in (param.fqn, *param.aliases)}
        self.as_unsharded = False
        """Whether reads of a sharded weight return the dtype that the weight has while it is unsharded."""
        self.found: dict[str, ParamDtypes] = {}
        """FQN -> dtypes of a weight that is unsharded at the read; in the order of the reads."""
        self.found_sharded: dict[str, ParamDtypes] = {}
        """The same, of weights that are sharded at the read."""

    def answer(self, tensor: torch.Tensor, result: Any) -> Any:
        """Return what a function returns that has read the dtype of `tensor`: the stored dtype of a weight."""
        if not isinstance(tensor, nn.Parameter) or result != tensor.dtype or not self._state.root_forward.runs_model:
            return result
        named = self._state.root.named_parameters()
        fqn = next((fqn for fqn, parameter in named if parameter is tensor), "")
        dtypes = self._dtypes.get(fqn)
        if dtypes is None or dtypes.stored == dtypes.param:
            return result
        found = self.found_sharded if result == dtypes.stored else self.found
        found[fqn] = dtypes
        return dtypes.param if self.as_unsharded and fqn in self.found_sharded else dtypes.stored


def _are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Return whether two outputs have the same dtypes, shapes and values, where NaN equals NaN."""
    return [(tensor.dtype, tensor.shape) for tensor in first] == [
        (tensor.dtype, tensor.shape) for tensor in second
    ] and all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(first, second, strict=True))
