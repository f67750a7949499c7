"""`deepspeed.runtime`: the few names below it that scripts import."""

from typing import Any

from zeroamp.deepspeed.refused import missing
from zeroamp.deepspeed.runtime import engine as engine
from zeroamp.deepspeed.runtime import utils as utils
from zeroamp.deepspeed.runtime import zero as zero


def __getattr__(name: str) -> Any:
    return missing(__name__, name, ("engine", "utils", "zero"))
