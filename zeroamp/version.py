"""The version of zeroamp, equal to that in `pyproject.toml`."""

__version__ = "0.4.0"
