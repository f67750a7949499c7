"""The public names of zeroamp.deepspeed, for type checkers; `__init__.py` imports each name from where it says."""

from types import ModuleType

from zeroamp.deepspeed import accelerator as accelerator
from zeroamp.deepspeed import comm as comm
from zeroamp.deepspeed import ops as ops
from zeroamp.deepspeed import utils as utils
from zeroamp.deepspeed import zero as zero
from zeroamp.deepspeed.accelerator import get_accelerator as get_accelerator
from zeroamp.deepspeed.arguments import DeepSpeedConfigError as DeepSpeedConfigError
from zeroamp.deepspeed.arguments import add_config_arguments as add_config_arguments
from zeroamp.deepspeed.comm import init_distributed as init_distributed
from zeroamp.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
from zeroamp.deepspeed.initialization import initialize as initialize
from zeroamp.deepspeed.optimizer import ZeroOptimizer as ZeroOptimizer
from zeroamp.deepspeed.refused import UnsupportedError as UnsupportedError
from zeroamp.deepspeed.utils import log_dist as log_dist
from zeroamp.deepspeed.utils import logger as logger
from zeroamp.version import __version__ as __version__

runtime: ModuleType  # `submodules` makes it
