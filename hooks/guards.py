"""Guards that raise: safe modules with autocast off, backwards that bypass `TrainStep`, casts of a wrapped model."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import PrecisionError, StepError, WrapError


def attach_safe_module_guard(module: nn.Module, fqn: str, device_type: str) -> RemovableHandle:
    """Raise before a forward of a safe module outside autocast, where it would compute in low precision unasked."""

    def check(module: nn.Module, _args: Any) -> None:
        if not torch.is_autocast_enabled(device_type):
            raise PrecisionError(
                f"{fqn} (a {type(module).__name__}) ran with autocast off, but its parameters are all-gathered in "
                "low precision. Leave its class out of torch_autocast.lower_precision_safe_modules: its parameters "
                "then stay fp32."
            )

    return module.register_forward_pre_hook(check)


def refuse_casts(module: nn.Module, fqn: str, dtypes: Collection[torch.dtype]) -> None:
    """Raise WrapError where `module.to(dtype)` and the like would cast shards in `dtypes`, before anything is changed.

    All such methods call `_apply` with a function of one tensor. It is tried on an empty tensor of each dtype.
    """
    apply = module._apply

    def apply_unless_cast(function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for stored in dtypes:
            if (dtype := function(torch.empty(0, dtype=stored)).dtype) != stored:
                raise WrapError(
                    f"{fqn or 'The model'} was cast from {short_name(stored)} to {short_name(dtype)} after wrap_model. "
                    "The shards must stay as they are stored: cast the model before wrap_model, or after "
                    "zeroamp.unwrap_model."
                )
        applied: nn.Module = apply(function, recurse)  # type: ignore[no-untyped-call]
        return applied

    module._apply = apply_unless_cast  # type: ignore[method-assign]


def allow_casts(module: nn.Module) -> None:
    """Undo `refuse_casts`."""
    vars(module).pop("_apply", None)


class BackwardGuard:
    """Raises in a backward through the model's outputs, unless a `TrainStep.backward` of this process runs it.

    Attached only if a plain `loss.backward(); optimizer.step()` would ignore a key of the config, or parameters.
    """

    armed: ClassVar[bool] = False
    """Whether a `TrainStep.backward` is running, of any model: the loss of a generator is computed by another one. The
    gradients that it leaves on the other model are refused by that model's own `TrainStep`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @classmethod
    @contextmanager
    def let_pass(cls) -> Iterator[None]:
        """Let the backwards inside the context pass."""
        cls.armed = True
        try:
            yield
        finally:
            cls.armed = False

    def watch(self, output: object) -> None:
        """Watch the tensors in an output of the model, which stays unchanged.

        Called before FSDP2's own post-forward hook, so that this hook on an output tensor is the first of them: raising
        after FSDP2's pre-backward would leave its backward begun for ever.
        """
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._check)  # type: ignore[no-untyped-call]

    def _check(self, _grad: torch.Tensor) -> None:
        if not self.armed:
            raise StepError(
                f"loss.backward() was called, but {self.reason}, which a plain backward leaves out. "
                "Call zeroamp.TrainStep(model, optimizer).backward(loss), then .step()."
            )
