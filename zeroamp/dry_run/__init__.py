"""Predicts memory and communicated bytes of an optimizer step from shapes, without running the training."""
