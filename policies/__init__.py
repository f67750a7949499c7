"""Reads a config into frozen values. Does not use `torch.distributed`."""
