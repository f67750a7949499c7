"""`deepspeed.runtime.zero.partition_parameters`: the same names as `deepspeed.zero`."""

from zeroamp.deepspeed.zero import GatheredParameters as GatheredParameters
from zeroamp.deepspeed.zero import Init as Init
from zeroamp.deepspeed.zero import ZeroParamStatus as ZeroParamStatus
from zeroamp.deepspeed.zero import register_external_parameter as register_external_parameter
