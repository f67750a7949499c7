"""One rank's memory in a real training step, beside what the dry run says of it."""

import ctypes
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import zeroamp
from tests.measuring.allocated import Allocated
from tests.models.small import batch, build
from tests.processes.training import config, wrapped
from zeroamp.dry_run.memory import memory_timeline
from zeroamp.dry_run.optimizer_step import optimizer_costs
from zeroamp.dry_run.planned_traffic import plan_traffic
from zeroamp.dry_run.timeline import KINDS
from zeroamp.dry_run.traced_micro_batch import trace_micro_batch
from zeroamp.hooks._torch.dispatch import is_part_of_parameter
from zeroamp.planning.mesh import ranks_of
from zeroamp.wrapping.state import wrap_state

NUM_STEPS = 4
"""The first makes the optimizer's state. Of the others the smallest peak counts: gloo's own thread may hold what it
sent for a moment longer, in one step or another."""
SAMPLES = 16


def forward_arguments(name, inputs):
    if name == "hf_llama":
        return (), {"input_ids": inputs, "labels": inputs, "use_cache": False}
    return (inputs,), {}


def _recompute(model, units):
    for unit in units:
        module = model.get_submodule(unit)
        forward = module.forward
        module.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )


def _outside_of_torch(sizes):
    """As `zeroamp.save_on_cpu`, with memory that torch has not allocated as the host's. Appends bytes to `sizes`."""

    def pack(tensor):
        if is_part_of_parameter(tensor):
            return tensor
        storage, item = tensor.untyped_storage(), tensor.element_size()
        buffer, strides = ctypes.string_at(storage.data_ptr(), storage.nbytes()), [item * s for s in tensor.stride()]
        offset = item * tensor.storage_offset()
        sizes.append(tensor.nbytes)
        return tensor.dtype, np.ndarray(tuple(tensor.shape), f"u{item}", buffer, offset, strides).copy()

    def unpack(packed):
        if isinstance(packed, torch.Tensor):
            return packed
        dtype, values = packed
        tensor = torch.empty(values.shape, dtype=dtype)
        ctypes.memmove(tensor.data_ptr(), values.ctypes.data, values.nbytes)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def measured_step(name, options, checkpointing=False, fields=None, mesh_shape=None, prepare=None, offload=False):
    """Train, and return what a step held and moved, and what the first rank predicts, as plain numbers."""
    with Allocated() as allocated:
        inputs = batch(name, 0, SAMPLES)
        model = wrapped(name, config(**options), fields=fields, mesh_shape=mesh_shape, prepare_before=prepare)
        found = _measured(allocated, model, forward_arguments(name, inputs), checkpointing, offload)
    state, of_first = wrap_state(model), [None]
    if dist.get_rank() == 0:  # the trace takes most of the time
        ranks = ranks_of(state.mesh)
        of_first = [predicted_step(name, state.plan, ranks, inputs, checkpointing, prepare, offload)]
    dist.broadcast_object_list(of_first)
    return found, of_first[0]


def _measured(allocated, model, arguments, checkpointing, offload=False):
    """Train a wrapped model; return what a step held and moved."""
    state = wrap_state(model)
    if checkpointing:
        _recompute(model, state.plan.units)
    has_bf16_states = wrap_state(model).plan.policy.optimizer_states_dtype is not None
    adamw = zeroamp.Bf16StatesAdamW if has_bf16_states else partial(torch.optim.AdamW, foreach=False)
    optimizer = adamw(model.parameters())
    sizes = _gradient_sizes(optimizer, model)
    step = zeroamp.TrainStep(model, optimizer)
    args, kwargs = arguments
    peaks, on_host = [], []
    for _ in range(NUM_STEPS):
        allocated.reset_peak()
        on_host.clear()
        state.traffic.reset()
        for _ in range(state.plan.policy.gradient_accumulation_steps):
            with _outside_of_torch(on_host) if offload else nullcontext():
                loss = _loss(model(*args, **kwargs))
            step.backward(loss)
            del loss
            step.step()
        peaks.append(allocated.peak)
    return {
        "peak": min(peaks[1:]),
        "on the host": sum(on_host),
        "parameters": sum(p.to_local().untyped_storage().nbytes() for p in model.parameters()),
        "gradients": sizes.pop("gradients"),
        "optimizer state": sum(
            _local(value).nbytes
            for of_one in optimizer.state.values()
            for value in of_one.values()
            if isinstance(value, torch.Tensor)
        ),
        "traffic": _rows(state.traffic),
    }


def predicted_step(name, plan, ranks, inputs, checkpointing, prepare, offload):
    model = build(name)
    if prepare is not None:
        prepare(model)
    return predicted(model, plan, ranks, forward_arguments(name, inputs), checkpointing, offload)


def predicted(model, plan, ranks, arguments, checkpointing, offload=False):
    """What the dry run says of a step of a model that is not wrapped."""
    costs = optimizer_costs(plan, ranks, None, foreach=False)
    traced = trace_micro_batch(
        model, plan, arguments, device_type="cpu", checkpointing=checkpointing, offload_activations=offload
    )
    timeline = memory_timeline(plan, ranks, traced, costs, on_cpu=True)
    at_start = timeline.peak("init")
    at_end = dict(zip(KINDS, timeline.num_bytes[-1].tolist(), strict=True))
    return {
        "peak": timeline.peak_bytes(),
        "on the host": timeline.host_activations,
        **{kind: at_end[kind] for kind in ("parameters", "gradients", "optimizer state")},
        "traffic": _rows(plan_traffic(plan, ranks)),
        "left over": {kind: at_end[kind] - at_start[kind] for kind in KINDS if at_end[kind] != at_start[kind]},
    }


def _gradient_sizes(optimizer, model):
    """Return a dict that every optimizer step fills with the bytes of the storages of the gradients."""
    sizes = {}

    def note(_optimizer, _args, _kwargs):
        storages = [_local(p.grad).untyped_storage() for p in model.parameters() if p.grad is not None]
        sizes["gradients"] = sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    optimizer.register_step_pre_hook(note)
    return sizes


def _loss(output):
    return getattr(output, "loss", output)


def _local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


def _rows(traffic):
    return {
        f"{c} {str(d).removeprefix('torch.')}": total for (c, d), total in sorted(traffic.by_dtype().items(), key=str)
    }
