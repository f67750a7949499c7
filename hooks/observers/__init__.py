"""Observers of a training model: labels in traces, dtypes. They do not change tensors."""
