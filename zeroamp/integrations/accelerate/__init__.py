"""accelerate on zeroamp: `ZeroampAccelerator`, a subclass of its `Accelerator`. Tested with accelerate 1.15."""

from zeroamp.integrations.accelerate.accelerator import ZeroampAccelerator

__all__ = ["ZeroampAccelerator"]
