"""Runs a model once, on fake tensors or on copies, and records how it uses its parameters."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dispatch import FakeTensorMode
from zeroamp.hooks._torch.dtensor import without_wrapper
from zeroamp.hooks.precision.autocast_ops import casting
from zeroamp.hooks.random_state import preserved_random_state
from zeroamp.hooks.tensors import tensors_in
from zeroamp.hooks.tracing.experts import route_evenly
from zeroamp.hooks.tracing.fake_run import Replacements, tensors_replaced
from zeroamp.hooks.tracing.use_recorder import UseRecorder
from zeroamp.policies.dtypes import stored_dtype


def record_run(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device_type: str,
    fake: bool,
    low: Collection[str] = (),
    ops: frozenset[str] = frozenset(),
) -> UseRecorder:
    """Run forward and backward once under `torch.autocast(device_type, dtype)`; return the recorded uses of parameters.

    The run does not change parameters, buffers, gradients, attributes, random states or autocast's cache. It uses fake
    tensors (`fake`) or copies on `device_type`. transformers' fused experts get a balanced routing on fake tensors.

    Args:
        model: on any device.
        args: of the forward.
        kwargs: of the forward.
        dtype: the low dtype.
        device_type: of the run. For "cuda" without a usable device, fake tensors run a forward but no backward:
            `has_run_backward` of the result is then False.
        fake: whether to run on fake tensors.
        low: FQNs of parameters that have `dtype` in the run, as if they were all-gathered in it. The others have the
            dtype in which `wrap_model` stores them.
        ops: names of `zeroamp.autocast_ops` whose arguments autocast also casts, in recomputation too.
    """
    recorder = UseRecorder(dtype, model)
    parameters = dict(model.named_parameters())
    low_ids = {id(parameters[name]) for name in low}

    def make(tensor: torch.Tensor) -> torch.Tensor:
        stored = stored_dtype(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype
        return replacement(tensor, dtype if id(tensor) in low_ids else stored, device_type, fake)

    with run_context(device_type, fake=fake), tensors_replaced(model, replacements := Replacements(make)):
        for name, parameter in parameters.items():
            recorder.add(name, parameter, replacements.of(parameter))
        args, kwargs = replacements.of(tuple(args)), replacements.of(dict(kwargs))
        if fake:
            route_evenly(model)
        with recorder.attached(), casting(ops):
            with _autocast(device_type, dtype):
                outputs = model(*args, **kwargs)
            recorder.note_outputs(outputs)
            if can_run_backward(device_type):
                _run_backward(recorder, outputs)
    return recorder


def can_run_backward(device_type: str) -> bool:
    """Return whether a backward can run on a device type. Autograd's engine needs a usable device, also for fakes."""
    return device_type == "cpu" or bool(torch.get_device_module(device_type).is_available())


def _run_backward(recorder: UseRecorder, outputs: Any) -> None:
    roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    if roots:
        recorder.has_run_backward = True
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def replacement(tensor: torch.Tensor, dtype: torch.dtype, device_type: str, fake: bool) -> torch.Tensor:
    """Return a copy of `tensor` on a device type, in `dtype`. With `fake` it is an empty tensor of the same strides.

    Of a DTensor, the local part is copied.
    """
    if isinstance(tensor, DTensor):
        part = replacement(without_wrapper(tensor.detach()), dtype, device_type, fake)
        own, placements = tensor.device_mesh, tensor.placements
        shape, stride = tensor.size(), tensor.stride()
        copied: torch.Tensor = DTensor.from_local(part, own, placements, run_check=False, shape=shape, stride=stride)
    elif fake:
        copied = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device_type)
    else:
        copied = tensor.detach().to(device_type, dtype, copy=True)
    if isinstance(tensor, nn.Parameter):
        parameter = nn.Parameter(copied, requires_grad=tensor.requires_grad)
        # Without `quant_state` bitsandbytes would make a parameter of its own class, which is not a fake tensor.
        if fake and hasattr(tensor, "quant_state"):
            parameter.quant_state = tensor.quant_state  # type: ignore[attr-defined]
        return parameter
    return copied.requires_grad_(tensor.requires_grad)


@contextmanager
def run_context(device_type: str, *, fake: bool) -> Iterator[None]:
    """Run the body with gradients on and uncompiled, and restore random states. `fake`: make its tensors fake."""
    with ExitStack() as stack:
        stack.enter_context(preserved_random_state(device_type))
        # Enables gradients, also if the caller is in `no_grad` or in inference mode.
        stack.enter_context(torch.inference_mode(False))
        # Compiled modules run eagerly under a dispatch mode, but with fullgraph=True torch 2.13 and 2.15 raise instead.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


@contextmanager
def _autocast(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Enter autocast, also for a device type without a usable device. Clears autocast's cache at the end.

    `torch.autocast` clears the cache only when the outermost context ends, which may be the caller's. For CUDA without
    a device it disables itself. Its state is then set directly, and an autocast that the model enters raises.
    """
    try:
        if can_run_backward(device_type):
            with torch.autocast(device_type, dtype=dtype):
                yield
            return
        before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, dtype)
        torch.autocast_increment_nesting()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "User provided device_type of 'cuda', but CUDA is not available")
                yield
        finally:
            torch.autocast_decrement_nesting()
            torch.set_autocast_enabled(device_type, before[0])
            torch.set_autocast_dtype(device_type, before[1])
    finally:
        torch.clear_autocast_cache()
