"""Sums of sharded gradients over micro-batches in another dtype or order than FSDP2 has."""
