"""Applies a `Plan` to a model: checks, sharding with FSDP2, hooks, and the state of a wrapped model."""
