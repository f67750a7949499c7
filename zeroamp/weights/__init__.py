"""Reads safetensors files into a wrapped model, and writes its weights as safetensors."""
