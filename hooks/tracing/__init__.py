"""Runs of a model on fake tensors, and what they show of its parameters."""
