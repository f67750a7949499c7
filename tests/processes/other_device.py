"""Runs code as if the model were on another device than the tensors that are made without a device."""

import contextlib
import os
import sys

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zeroamp.wrapping.state import is_wrapped

TORCH = os.path.dirname(torch.__file__) + os.sep


class _Devices(TorchFunctionMode):
    """Marks tensors that would be on the model's device, and raises for an op on one of them and on another tensor."""

    def __init__(self, file):
        super().__init__()
        self.file = file
        self.marked = set()  # addresses of tensors, which `kept` keeps alive
        self.kept = []

    def mark(self, value):
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                self.marked.add(id(tensor))
                self.kept.append(tensor)

    def _is_there(self, tensor):
        return id(tensor) in self.marked or tensor.dim() == 0 or isinstance(tensor, torch.nn.Parameter)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not _is_called_by(self.file):
            if function is torch.Tensor.float and id(args[0]) in self.marked:  # a wrapped model's output in fp32
                self.mark(result)
            return result
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        is_moved = any(isinstance(each, torch.device) for each in tree_leaves((args, kwargs)))
        if is_moved:
            self.mark(result)
        elif any(id(each) in self.marked for each in tensors):
            others = [each for each in tensors if not self._is_there(each)]
            if others:
                raise RuntimeError(f"{function.__name__}: a tensor of shape {tuple(others[0].shape)} is on the CPU")
            self.mark(result)
        return result


def _is_called_by(file):
    """Return whether the innermost caller outside of torch is code of this file."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == file


@contextlib.contextmanager
def model_on_another_device(file):
    """Raise RuntimeError where code of `file` uses an output of a wrapped model with a tensor made without a device."""
    mode = _Devices(file)

    def see(module, _args, output):
        if is_wrapped(module):
            mode.mark(output)

    handle = torch.nn.modules.module.register_module_forward_hook(see)
    try:
        with mode:
            yield
    finally:
        handle.remove()
