"""Returns the outputs of a forward in fp32, so that a loss outside of the forward is computed in fp32.

| output | returned |
|---|---|
| with gradients: low-precision tensors that require grad, at any depth | in fp32 |
| without gradients: low-precision tensors of the outermost container, such as logits | in fp32 |
| the caller's own autocast surrounds the forward, so that it casts the ops of the loss | as computed |
| it has a 0-D loss: `output.loss`, the key "loss", the first item of a tuple, or the tensor itself | as computed |

The bits are those of autocast around forward and loss, for each op that autocast runs in fp32: autocast makes the same
cast. A tuple of (logits, loss) is cast too: the second item may be an auxiliary loss.
Caches of `generate` are not cast: they are inside of further containers, or in objects of other classes.
"""

from collections.abc import Mapping
from typing import Any

import torch

from zeroamp.hooks.root_forward import ForwardCall
from zeroamp.hooks.tensors import map_tensors, parts_of


class Fp32Outputs:
    """Casts the outputs of outermost forwards. See the table above."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        """`dtype`: the low precision of the config."""
        self._device_type, self._dtype = device_type, dtype
        self._is_autocast = False

    def before(self, call: ForwardCall) -> None:
        """Note whether the caller's autocast surrounds a forward: place "outer autocast" of `RootForward`."""
        if call.is_outermost:
            self._is_autocast = torch.is_autocast_enabled(self._device_type)

    def after(self, output: Any) -> Any:
        """Return the output of an outermost forward with its tensors in fp32."""
        return output if self._is_autocast else in_fp32(output, self._dtype)


def in_fp32(output: Any, dtype: torch.dtype) -> Any:
    """Return `output` with tensors of `dtype` in fp32, or as it is if it has a loss. No container is changed."""
    if _has_loss(output):
        return output
    outer = None if torch.is_grad_enabled() else [id(each) for each in (output, *parts_of(output).values())]

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_cast = tensor.dtype == dtype and (tensor.requires_grad if outer is None else id(tensor) in outer)
        return tensor.float() if is_cast else tensor

    return map_tensors(cast, output)


def _has_loss(output: Any) -> bool:
    loss: Any
    if isinstance(output, torch.Tensor):
        loss = output
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, list | tuple) and not hasattr(output, "loss"):
        loss = output[0] if output else None
    else:
        loss = getattr(output, "loss", None)
    return isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point()
