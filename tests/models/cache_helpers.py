"""Caches that a model of another Python module uses."""

from functools import lru_cache
from typing import ClassVar

import torch

TABLES = {}


def _table(size):
    return torch.arange(size, dtype=torch.float32) / size


@lru_cache
def of_function(size):
    return _table(size)


class Rotary:
    tables: ClassVar = {}

    @classmethod
    def of(cls, size):
        return cls.tables.setdefault(size, _table(size))
