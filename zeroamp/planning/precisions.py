"""`Precision`: whether one parameter is all-gathered and computed in low precision, and why."""

from dataclasses import dataclass
from typing import Literal

import torch

Compute = Literal["low", "per op", "fp32", "as stored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The precision of one parameter, and the reason for it."""

    is_low: bool
    """Whether it is all-gathered in the mode's low precision, if it is stored in fp32."""
    compute: Compute
    """ "low": in the mode's low precision; "per op": `torch.autocast` decides; "fp32": in an fp32 region; "as
    stored": nothing casts it."""
    reason: str
    communication: torch.dtype | None = None
    """Communication dtype of its gradient, if an override sets it. None: from the other keys of the config."""
    param: torch.dtype | None = None
    """The dtype in which it is all-gathered and unsharded, if `is_low`. None: the mode's low precision."""
    is_overridden: bool = False
    """Whether an override sets the dtype of its all-gather or of its ops."""
