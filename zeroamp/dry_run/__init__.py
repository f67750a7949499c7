"""Predicts memory, communicated bytes and time of an optimizer step from shapes, without running the training."""
