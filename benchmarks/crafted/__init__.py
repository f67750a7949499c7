"""Crafted files, and the functions that read them."""
