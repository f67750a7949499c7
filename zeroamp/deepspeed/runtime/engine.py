"""`deepspeed.runtime.engine`: `DeepSpeedEngine`, which annotations of scripts name."""

from zeroamp.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
