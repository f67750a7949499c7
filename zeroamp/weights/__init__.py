"""Initialises models from the meta device, reads safetensors files into a wrapped model, and writes its weights."""
