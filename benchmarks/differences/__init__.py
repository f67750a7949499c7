"""Kinds of differences between ranks."""
