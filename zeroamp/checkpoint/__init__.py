"""Checkpoints on `torch.distributed.checkpoint`: saves, loads and exports them, and saves on preemption."""
