"""The version, which `pyproject.toml` has too."""

__version__ = "0.1.0"
