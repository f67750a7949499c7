"""`deepspeed.ops.adam`: `FusedAdam` and `DeepSpeedCPUAdam`, as torch's AdamW with DeepSpeed's defaults."""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from zeroamp.deepspeed.refused import missing, refusal

__path__: list[str] = []  # a package: `submodules` imports `ops.adam.cpu_adam`


def FusedAdam(  # noqa: N802 - a class in DeepSpeed
    params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> torch.optim.Optimizer:
    """Return `torch.optim.AdamW`, or with `adam_w_mode=False` `torch.optim.Adam`.

    Raises:
        UnsupportedError: `bias_correction` is False.
    """
    if not bias_correction:
        raise refusal("Adam with bias_correction=False", "torch's Adam always corrects the bias of its moments.")
    optimizer = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return optimizer(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def DeepSpeedCPUAdam(  # noqa: N802 - a class in DeepSpeed
    model_params: ParamsT,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
) -> torch.optim.Optimizer:
    """Return what `FusedAdam` returns. It steps on the device of the shards, which the config chooses."""
    return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


def __getattr__(name: str) -> Any:
    return missing(__name__, name, ("DeepSpeedCPUAdam", "FusedAdam"))
