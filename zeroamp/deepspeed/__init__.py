"""Checkpoints of DeepSpeed's ZeRO: their files (`files`), what they hold (`contents`), to a model (`load`)."""
