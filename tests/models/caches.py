"""Models whose code caches tensors, each in another place. In each, `forward(x)` is x plus a position table."""

from functools import lru_cache, wraps
from typing import ClassVar

import torch
from torch import nn

from tests.models import cache_helpers

TABLES = {}
LAST = None
LIST = []


def table(size):
    return torch.arange(size, dtype=torch.float32) / size


@lru_cache(maxsize=4)
def of_function(size):
    return table(size)


@lru_cache
def _tuple_in_dict(size):
    return {"tables": (table(size),)}


def _hidden(function):
    """As transformers' `compile_compatible_method_lru_cache`: the cache is a variable of the wrapper only."""
    cached = lru_cache(maxsize=32)(function)

    @wraps(function)
    def wrapper(*args):
        return cached(*args)

    return wrapper


class Plain:
    """An object that is no module, as a helper for rotary embeddings."""

    shared: ClassVar = {}

    def __init__(self):
        self.size, self.table = None, None

    def of(self, size):
        if self.size != size:
            self.size, self.table = size, table(size)
        return self.table

    def of_class(self, size):
        return self.shared.setdefault("nested", {}).setdefault(size, table(size))


PLAIN = Plain()


class Model(nn.Module):
    """A Linear layer, and a table from the cache that `kind` names."""

    by_size: ClassVar = {}
    size, current = None, None

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.lin = nn.Linear(8, 8)
        self.helper = Plain()
        self.helpers = [Plain()]
        self.own = {}
        self.register_buffer("buffer", None, persistent=False)

        @lru_cache
        def in_closure(size):
            return table(size)

        self.in_closure = lambda size: in_closure(size + 0)  # the cache is in a closure

    @lru_cache  # noqa: B019
    def method(self, size):
        return table(size)

    @_hidden
    def hidden(self, size):
        return table(size)

    def forward(self, x):
        return self.lin(x) + getattr(self, f"_{self.kind}")(x.shape[-1])

    def _lru_function(self, size):
        return of_function(size)

    def _lru_structure(self, size):
        return _tuple_in_dict(size)["tables"][0]

    def _lru_method(self, size):
        return self.method(size)

    def _lru_in_a_wrapper(self, size):
        return self.hidden(size)

    def _lru_in_a_closure(self, size):
        return self.in_closure(size)

    def _lru_of_another_module(self, size):
        return cache_helpers.of_function(size)

    def _class_dict(self, size):
        return self.by_size.setdefault(size, table(size))

    def _class_attributes(self, size):
        if Model.size != size:
            Model.size, Model.current = size, table(size)
        return self.current

    def _global_dict(self, size):
        return TABLES.setdefault((size, "cpu"), table(size))

    def _global_list(self, size):
        if not LIST:
            LIST.append(table(size))
        return LIST[0]

    def _global_name(self, size):
        global LAST
        if LAST is None:
            LAST = table(size)
        return LAST

    def _global_object(self, size):
        return PLAIN.of(size)

    def _object_of_the_module(self, size):
        return self.helper.of(size)

    def _object_in_a_list(self, size):
        return self.helpers[0].of(size)

    def _class_of_an_object(self, size):
        return self.helper.of_class(size)

    def _attribute(self, size):
        return self.own.setdefault(size, table(size))

    def _buffer(self, size):
        if self.buffer is None:
            self.buffer = table(size)
        return self.buffer

    def _dict_of_another_module(self, size):
        return cache_helpers.TABLES.setdefault(size, table(size))

    def _class_of_another_module(self, size):
        return cache_helpers.Rotary.of(size)


KINDS = [name[1:] for name in vars(Model) if name.startswith("_") and not name.startswith("__")]
