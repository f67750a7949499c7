"""`zeroamp.find_nonfinite`: names the first value of an optimizer step that is not finite, and the rank that had it.

Each check leaves one bool on the device. The host reads the norm of a step, and only if it is not finite the bools.
They are in the order in which the values appeared: outputs of modules in the forward, then gradients in the backward.
"""

import logging
import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks.tensors import tensors_in
from zeroamp.planning.mesh import is_first_rank, local_part
from zeroamp.policies.errors import some_of
from zeroamp.policies.extensions import Extension
from zeroamp.rank_group import signals_of
from zeroamp.training.callbacks import Callback, Receive
from zeroamp.training.step import TrainStep, driver_of
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import WrapState

logger = logging.getLogger("zeroamp")

MOST_CHECKS = 100_000
"""Checks that are retained until an optimizer step ends. Forwards with gradients that no step follows add to them."""


REDUCED = "the sum over ranks of the gradients of "
"""Begins the name of a check after the reduction, which brings a value of one rank to others."""


class FindNonfinite(Extension):
    """Adds hooks to all modules of a wrapped model, and a callback to its optimizer steps."""

    needs_train_step = "find_nonfinite True"

    def attach(self, model: nn.Module, state: WrapState) -> None:
        """Add the hooks. FSDP2's run before these before a forward, so that these find unsharded parameters."""
        finder = _Finder(state)
        model.register_forward_pre_hook(finder.see_inputs, with_kwargs=True)
        for fqn, module in model.named_modules():
            module.register_forward_pre_hook(partial(finder.see_parameters, fqn))
            module.register_forward_hook(partial(finder.see_output, fqn))
        state.callbacks.append(finder)

    def attach_step(self, train: TrainStep) -> None:
        """Turn off the warning that names this key."""
        driver_of(train).nonfinite_hint.is_given = True


class _Finder(Callback):
    """Checks values, and logs the first ones of each rank if an optimizer step has a norm that is not finite."""

    def __init__(self, state: WrapState) -> None:
        self._state = state
        self._checks: list[tuple[str, torch.Tensor]] = []
        """What was checked, and whether it was finite: 0-D bool on the device."""
        self._leaves: dict[int, torch.Tensor] = {}
        """The unsharded parameters that have a hook, by id."""
        self._was_finite = True

    def see_inputs(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            self._check("an input of the model", tensor)

    def see_parameters(self, fqn: str, module: nn.Module, _args: Any) -> None:
        for name, parameter in module.named_parameters(fqn, recurse=False):
            if parameter.requires_grad and id(parameter) not in self._leaves and not isinstance(parameter, DTensor):
                self._leaves[id(parameter)] = parameter
                parameter.register_hook(partial(self._check, f"the gradient of {name}"))  # type: ignore[no-untyped-call]

    def see_output(self, fqn: str, module: nn.Module, _args: Any, output: Any) -> None:
        name = f"{fqn} (a {type(module).__name__})" if fqn else "the model"
        for tensor in tensors_in(output):
            self._check(f"the output of {name}", tensor)
            if tensor.requires_grad and not torch.compiler.is_compiling():
                tensor.register_hook(partial(self._check, f"the gradient of the output of {name}"))  # type: ignore[no-untyped-call]

    def _check(self, what: str, tensor: torch.Tensor) -> None:
        is_off = torch.compiler.is_compiling() or self._state.step.is_observed or len(self._checks) >= MOST_CHECKS
        in_forward_alone = not torch.is_grad_enabled() and "gradient" not in what
        if is_off or in_forward_alone or not tensor.is_floating_point() or tensor.itemsize < 2:  # not float8
            return
        with torch.no_grad():
            self._checks.append((what, local_part(tensor).isfinite().all()))

    def statistics(self) -> tuple[tuple[float, ...], Receive]:
        """Check the gradients after their reduction: a sum may overflow. There is nothing to sum over the ranks."""
        for fqn, parameter in self._state.root.named_parameters():
            if parameter.grad is not None:
                self._check(f"{REDUCED}{fqn} in its shard", parameter.grad)
        return (), lambda _sums: None

    def on_step_end(self, report: StepReport) -> None:
        """Read the norm, which is equal on all ranks. If it is the first that is not finite, log where it began."""
        is_finite, was_finite = math.isfinite(report.grad_norm), self._was_finite
        self._was_finite = is_finite
        if not is_finite and was_finite:
            found = signals_of(self._state).run(self._first)
            if is_first_rank(self._state.axes.whole):
                _log(report, found)
        self._checks.clear()

    def on_step_discarded(self) -> None:
        """Forget the checks of the step."""
        self._checks.clear()

    def _first(self) -> str | None:
        flags = torch.stack([flag for _, flag in self._checks]).tolist() if self._checks else []
        return next((what for (what, _), flag in zip(self._checks, flags, strict=True) if not flag), None)


def _log(report: StepReport, found: list[str | None]) -> None:
    places = [f"on rank {rank} {what}" for rank, what in enumerate(found) if what and not what.startswith(REDUCED)]
    places = places or [f"on rank {rank} {what}" for rank, what in enumerate(found) if what]
    what = f"The first value that is not finite was {some_of(places)}." if places else "No checked value was."
    scale = f" with loss scale {report.loss_scale:g}" if report.loss_scale != 1 else ""
    logger.warning("The gradient norm of %s is %s%s. %s", report.name, report.grad_norm, scale, what)
