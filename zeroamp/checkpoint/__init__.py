"""Checkpoints on `torch.distributed.checkpoint`: saves and loads them."""
