"""Optimizers and learning rates beyond a plain `TrainStep`: from the config, on whole matrices, on 8-bit state."""
