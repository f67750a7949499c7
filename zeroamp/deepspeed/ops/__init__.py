"""`deepspeed.ops`: the optimizers in `ops.adam`. Type checkers and editors find it because it is a file."""

from typing import Any

from zeroamp.deepspeed.ops import adam as adam
from zeroamp.deepspeed.refused import missing


def __getattr__(name: str) -> Any:
    return missing(__name__, name, ("adam",))
