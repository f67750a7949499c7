"""Finds the parameters that are safe in low precision from the uses of each parameter in a run on fake tensors."""
