"""`deepspeed.ops`: the optimizers of `ops.adam`, as torch's optimizers."""

from typing import Any

from zeroamp.deepspeed.ops import adam as adam
from zeroamp.deepspeed.refused import missing


def __getattr__(name: str) -> Any:
    return missing(__name__, name, ("adam",))
