"""In which dtypes plain `torch.autocast` reads each parameter: what the dispatcher runs on it, on real tensors.

Autocast casts above the dispatcher's key, so a dispatch mode sees each cast of a parameter, or of a view of it, as an
op. A parameter that only such casts read is one that autocast reads in the low dtype alone.
"""

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.oracles.low_precision_gather import run


class _Reads(TorchDispatchMode):
    def __init__(self, model, dtype):
        super().__init__()
        self.dtype = dtype
        self.names = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
        self.dtypes = {name: set() for name in self.names.values()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ != "_unsafe_view":  # a view reads no values
            is_cast = func.overloadpacket.__name__ == "_to_copy" and out.dtype == self.dtype
            for value in tree_iter((args, kwargs)):
                if name := self.names.get(value.untyped_storage().data_ptr() if hasattr(value, "data_ptr") else None):
                    self.dtypes[name].add(self.dtype if is_cast else value.dtype)
        return out


def dtypes_read(model, args, kwargs, dtype):
    """Return the dtypes in which a forward and backward under plain autocast read each parameter, by its name."""
    with _Reads(model, dtype) as reads:
        run(model, args, kwargs, dtype)
    return reads.dtypes
