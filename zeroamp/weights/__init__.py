"""Safetensors out of a wrapped model and into it."""
