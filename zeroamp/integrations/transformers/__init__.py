"""transformers: `ZeroampTrainer`, `ZeroampMixin` for other Trainer classes, and their arguments.

Tested with transformers 5.3.0 and 5.24.0, and accelerate 1.15.0.
"""

from zeroamp.integrations.transformers.arguments import ZeroampArguments, ZeroampTrainingArguments, fill_auto
from zeroamp.integrations.transformers.trainer import ZeroampMixin, ZeroampTrainer

__all__ = ["ZeroampArguments", "ZeroampMixin", "ZeroampTrainer", "ZeroampTrainingArguments", "fill_auto"]
