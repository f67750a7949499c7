"""Checkpoints on `torch.distributed.checkpoint`: what is in one (`state`), onto disk (`save`), and back (`load`)."""
