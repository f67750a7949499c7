"""`deepspeed.moe`: expert-parallel layers, which are refused, and functions that look for them."""

from zeroamp.deepspeed.moe import layer as layer
from zeroamp.deepspeed.moe import utils as utils
