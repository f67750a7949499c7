"""Which parameters of a test run in `make test`, and which only in `make test-all`."""

import pytest


def slow_but(values, *fast):
    """Return the values as a test's parameters. All are marked slow, except those in `fast`."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
