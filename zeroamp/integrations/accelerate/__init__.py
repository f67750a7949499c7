"""accelerate: `ZeroampAccelerator`, a subclass of its `Accelerator` that trains with zeroamp. Tested with 1.15."""

from zeroamp.integrations.accelerate.accelerator import ZeroampAccelerator

__all__ = ["ZeroampAccelerator"]
