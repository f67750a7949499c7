"""`deepspeed.runtime.zero`: the same names as `deepspeed.zero`."""

from typing import Any

from zeroamp.deepspeed.refused import missing
from zeroamp.deepspeed.zero import GatheredParameters as GatheredParameters
from zeroamp.deepspeed.zero import Init as Init
from zeroamp.deepspeed.zero import ZeroParamStatus as ZeroParamStatus
from zeroamp.deepspeed.zero import register_external_parameter as register_external_parameter


def __getattr__(name: str) -> Any:
    return missing(__name__, name, ("GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"))
