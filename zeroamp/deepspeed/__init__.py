"""Checkpoints of DeepSpeed's ZeRO, read without DeepSpeed. Importing the package itself loads nothing else."""
