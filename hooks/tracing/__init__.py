"""Runs a model on fake tensors, and records which ops use each parameter and in which dtype."""
