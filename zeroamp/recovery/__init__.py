"""Continues training after an exception on some ranks, by `zeroamp.recovery`. Off by default."""
