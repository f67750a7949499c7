"""zeroamp, FSDP2, DDP and DeepSpeed on the same model: what `step_time` and `step_memory` measure."""
