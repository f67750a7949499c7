"""`Bf16StatesAdamW`: AdamW with fp32 weights whose state is in bf16, and the key `optimizer_states_dtype`.

[Note: Where the fp32 copies are]
torch's fused kernel on CUDA reads moments in bf16, computes in fp32 and rounds them once (torch 2.13 and newer). It
makes no copy. torch's other implementations need one dtype for all tensors: there the moments of `CHUNK` elements at a
time are cast to fp32, updated by torch, and rounded back.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from zeroamp.optimizers.optimizer_params import AdamParams
from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import ConfigError, StepError
from zeroamp.policies.extensions import Extension
from zeroamp.policies.policy import Policy

logger = logging.getLogger("zeroamp")

KEY = "data_types.optimizer_states_dtype"
CHUNK = 2**24
"""Elements that are cast to fp32 at a time: 128 MiB for both moments."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Bf16StatesAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` that stores `exp_avg` and `exp_avg_sq` in bf16: 12 bytes per parameter instead of 16.

    The update is computed in fp32: the moments are cast to fp32, updated, and rounded to the nearest bf16, ties to
    even. Parameters must be fp32, as those of a wrapped model are; moments of 0-D and of other parameters have the
    parameter's dtype. `load_state_dict` rounds moments that were saved in fp32. `torch.optim.AdamW` loads moments in
    bf16 exactly. DeepSeek-V3 was trained with such moments (arXiv 2412.19437, section 3.3.3).

    Choose `betas[1]` of at most 0.99. A bf16 number does not change by less than 1/512 of itself. So with 0.999, the
    default of `torch.optim.AdamW`, second moments never fall; the constructor then logs a WARNING.

    Args:
        params: as for `torch.optim.AdamW`. So are the other arguments. torch's fused kernel is used where it can be.
        lr: the learning rate.
        betas: the decay of the moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        maximize: whether the loss is maximised.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)
        self.register_load_state_dict_post_hook(_round_moments)
        if (beta2 := max(group["betas"][1] for group in self.param_groups)) > 1 - 2**-9:
            logger.warning("Bf16StatesAdamW: with betas[1] = %s, second moments never fall. Take 0.99.", beta2)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient. Returns what `closure` returns, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            fused = torch.__version__ >= "2.13" and all(each.device.type == "cuda" for each in trained)
            for parameter in trained:
                _create_state(parameter, self.state[parameter], on_device=fused)
            update = _update_fused if fused else _update_in_chunks
            update(group, trained, [self.state[parameter] for parameter in trained])
        return loss


def has_bf16_states(parameter: torch.Tensor) -> bool:
    """Return whether `Bf16StatesAdamW` stores the moments of a parameter in bf16."""
    return parameter.dtype == torch.float32 and parameter.dim() > 0


def _create_state(parameter: nn.Parameter, state: dict[str, Any], *, on_device: bool) -> None:
    """Create the state before the first update. The fused kernel reads the step count `on_device`."""
    device = parameter.device if on_device else torch.device("cpu")
    if not state:
        dtype = torch.bfloat16 if has_bf16_states(parameter) else parameter.dtype
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device=device)
        for name in _MOMENTS:
            state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
    elif state["step"].device != device:  # loaded from a run on another device
        state["step"] = state["step"].to(device)


def _update_fused(group: dict[str, Any], parameters: list[nn.Parameter], states: list[dict[str, Any]]) -> None:
    for is_rounded in (True, False):  # the kernel takes lists of one dtype
        chosen = [
            (each, state) for each, state in zip(parameters, states, strict=True) if has_bf16_states(each) == is_rounded
        ]
        if chosen:
            tensors = [_local(each, state) for each, state in chosen]
            _adamw(group, [list(each) for each in zip(*tensors, strict=True)], fused=True)


def _update_in_chunks(group: dict[str, Any], parameters: list[nn.Parameter], states: list[dict[str, Any]]) -> None:
    """Update each parameter, `CHUNK` elements at a time: see [Note: Where the fp32 copies are]."""
    for parameter, state in zip(parameters, states, strict=True):
        *tensors, step = _local(parameter, state)
        for part, gradient, *moments in _chunks(tensors):
            copies = [moment.to(part.dtype) for moment in moments]
            _adamw(group, [[part], [gradient], [copies[0]], [copies[1]], [step.clone()]], fused=False)
            for moment, copy in zip(moments, copies, strict=True):
                if moment is not copy:
                    moment.copy_(copy)
        step += 1


def _local(parameter: nn.Parameter, state: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return this rank's parts of a parameter, its gradient and its moments, and the step count."""
    if parameter.grad is None:
        raise AssertionError("expected a parameter with a gradient")
    return *map(local_part, (parameter, parameter.grad, *(state[name] for name in _MOMENTS))), state["step"]


def _chunks(tensors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    if all(tensor.is_contiguous() for tensor in tensors) and tensors[0].numel() > CHUNK:
        tensors = [tensor.view(-1) for tensor in tensors]
        return zip(*(torch.split(tensor, CHUNK) for tensor in tensors), strict=True)
    return iter([tuple(tensors)])


def _adamw(group: dict[str, Any], tensors: list[list[torch.Tensor]], *, fused: bool) -> None:
    """Call torch's AdamW. `tensors`: parameters, gradients, first and second moments, and step counts."""
    parameters, gradients, exp_avgs, exp_avg_sqs, steps = tensors
    beta1, beta2 = group["betas"]
    adamw(
        parameters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        foreach=False,
        fused=fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _round_moments(optimizer: torch.optim.Optimizer) -> None:
    """Round moments to bf16. `load_state_dict` casts all state to the parameter's dtype, also what was bf16."""
    for parameter, state in optimizer.state.items():
        for name in _MOMENTS:
            if has_bf16_states(parameter) and name in state:
                state[name] = state[name].to(torch.bfloat16)


def example_optimizer(policy: Policy, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an AdamW whose state has the dtype of the config, for predictions and checks of a config."""
    return torch.optim.AdamW(params) if policy.optimizer_states_dtype is None else Bf16StatesAdamW(params)


class OptimizerStates(Extension):
    """Checks that optimizers store their state in the dtype of `data_types.optimizer_states_dtype`."""

    def check_config(self, policy: Policy) -> None:
        """Raise ConfigError if the block `optimizer` cannot have the dtype."""
        if policy.optimizer is None:
            return
        params = policy.optimizer.params
        is_adamw = isinstance(params, AdamParams) and params.adam_w_mode
        if not is_adamw or params.amsgrad or params.foreach:
            raise ConfigError(
                f'{KEY} is "bf16", which AdamW alone has, without amsgrad and foreach, but optimizer.type is '
                f'"{policy.optimizer.type}". Write "type": "AdamW" without the two, or remove {KEY}.'
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer, *, on_shards: bool) -> None:
        """Raise StepError for an optimizer that stores its state in another dtype."""
        del on_shards
        if not isinstance(optimizer, Bf16StatesAdamW):
            raise StepError(
                f'{KEY} is "bf16", but TrainStep was given a {type(optimizer).__name__}, whose state has another '
                "dtype. Build a zeroamp.Bf16StatesAdamW, or call zeroamp.optimizer_from_config with an AdamW block."
            )
