"""The engines that `step_time` and `step_memory` measure: zeroamp, FSDP2, DDP and DeepSpeed on the same model."""
