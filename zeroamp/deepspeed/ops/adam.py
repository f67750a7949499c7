"""`FusedAdam` and `DeepSpeedCPUAdam`, as torch's Adam and AdamW with DeepSpeed's arguments and defaults."""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from zeroamp.deepspeed.refused import missing, refusal

__path__: list[str] = []  # a package: `submodules` imports `ops.adam.fused_adam`

Betas = tuple[float, float]


def FusedAdam(  # noqa: N802 - a class in DeepSpeed
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Return `torch.optim.AdamW`, or with `adam_w_mode=False` `torch.optim.Adam`.

    Raises:
        UnsupportedError: `bias_correction` or `set_grad_none` is False.
    """
    if not set_grad_none:
        raise refusal("FusedAdam(set_grad_none=False)", "Leave it out: gradients are None after a step.")
    return _adam("FusedAdam", params, bias_correction, adam_w_mode, (lr, betas, eps, weight_decay, amsgrad))


def DeepSpeedCPUAdam(  # noqa: N802 - a class in DeepSpeed
    model_params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Return `torch.optim.AdamW`, or with `adamw_mode=False` `torch.optim.Adam`. It steps on the device of the shards.

    Raises:
        UnsupportedError: `bias_correction` or `fp32_optimizer_states` is False.
    """
    if not fp32_optimizer_states:
        raise refusal("DeepSpeedCPUAdam(fp32_optimizer_states=False)", "Optimizer state is fp32. Leave it out.")
    return _adam("DeepSpeedCPUAdam", model_params, bias_correction, adamw_mode, (lr, betas, eps, weight_decay, amsgrad))


def _adam(
    name: str, params: ParamsT, bias_correction: bool, is_decoupled: bool, rest: tuple[float, Betas, float, float, bool]
) -> torch.optim.Optimizer:
    if not bias_correction:
        raise refusal(f"{name}(bias_correction=False)", "torch's Adam always corrects the bias of its moments.")
    lr, betas, eps, weight_decay, amsgrad = rest
    optimizer = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    return optimizer(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def __getattr__(name: str) -> Any:
    return missing(__name__, name, ("DeepSpeedCPUAdam", "FusedAdam"))
