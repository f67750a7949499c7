"""`deepspeed.moe`: functions that look for expert-parallel layers. The layers are refused."""

from typing import Any

from zeroamp.deepspeed.moe import utils as utils
from zeroamp.deepspeed.refused import missing


def __getattr__(name: str) -> Any:
    return missing(__name__, name, ("utils",))
