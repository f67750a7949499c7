"""Checks before a model is wrapped: the ranks hold the same parameters and plans; torch and the device fit the policy.

FSDP2 shards what each rank holds and communicates nothing while it wraps. Ranks with other seeds would train a model
made of parts of different initialisations; at stage 0 and with HSDP, replicas would differ.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import has_reduction_options
from zeroamp.planning.plan import Plan
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import ConfigError, WrapError, describe
from zeroamp.policies.policy import Policy

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_plans_agree(plan: Plan, mesh: DeviceMesh) -> None:
    """Compare the parameter groups that the ranks of `mesh` planned. Ranks with other groups would wait for ever.

    Raises:
        WrapError: on all ranks.
    """
    groups = [(group.name, list(map(str, group.key)), [p.fqn for p in group.params]) for group in plan.groups]
    digest = int.from_bytes(hashlib.sha256(repr(groups).encode()).digest()[:7])  # fits int64, and so does its negative
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if int(bounds[0]) != -int(bounds[1]):
        raise WrapError(
            "wrap_model got plans of units and dtypes that differ between ranks. Pass the same model, policy, "
            'auto_wrap_policy and example inputs on all ranks. With safe modules "auto", pass one fixed '
            "example_inputs."
        )


def check_ranks_agree(model: nn.Module, mesh: DeviceMesh) -> None:
    """Compare a checksum of every parameter over all ranks of `mesh` (one small collective per axis).

    Parameters on the meta device are left out: they are initialised later, alike everywhere.

    Raises:
        WrapError: on all ranks, naming the first parameter that differs.
    """
    named = [(fqn, parameter) for fqn, parameter in model.named_parameters() if not parameter.is_meta]
    if not named:
        return
    sums = torch.stack([_checksum(parameter) for _, parameter in named])
    bounds = torch.cat([sums, -sums]).to(mesh.device_type)  # the maximum of -x is minus the minimum of x
    for axis in range(mesh.ndim):
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    largest, smallest = bounds[: len(named)], -bounds[len(named) :]
    differing = (largest != smallest).nonzero()
    if len(differing) > 0:
        raise WrapError(
            f"{named[int(differing[0])][0]} has values that differ between ranks ({len(differing)} parameters do). "
            "Call torch.manual_seed with one seed on all ranks before building the model, load one checkpoint, or set "
            "zeroamp.sync_module_states to true: all ranks then get the first rank's values."
        )


def _checksum(parameter: nn.Parameter) -> torch.Tensor:
    """Return the sum of the bits, read as integers: 0-D int64, on the CPU, so that it can be stacked."""
    data = parameter.detach().reshape(-1)
    return data.view(_INTEGER_OF_SIZE[data.element_size()]).sum(dtype=torch.int64).cpu()


def check_torch(policy: Policy) -> None:
    """Raise ConfigError if `policy` sets an option that FSDP2 of the installed torch does not have."""
    asked = {
        "zeroamp.reduce_scatter_input_buffers": policy.reduce_scatter_input_buffers > 1,
        "zeroamp.separate_reduce_scatter_group": policy.separate_reduce_scatter_group,
    }
    for key in (key for key, is_asked in asked.items() if is_asked and not has_reduction_options()):
        remedy = "Leave it out, or install a newer torch."
        raise ConfigError(f"{key} needs torch 2.13 or newer, but this is torch {torch.__version__}. {remedy}")


def check_device(policy: Policy, device_type: str) -> None:
    """Raise ConfigError if `device_type` cannot compute in `policy.low_dtype`, or lacks the mode's autocast or NVTX.

    On CUDA bfloat16 counts only where the hardware has it: torch would emulate it, slowly, on older GPUs.
    """
    if policy.ranges == "nvtx" and device_type != "cuda":
        found = f'"nvtx" on device type {device_type}'
        remedy = 'Write "profiler": torch.profiler takes the ranges everywhere.'
        raise ConfigError(describe("zeroamp.ranges", found, '"profiler" or "off" without CUDA', remedy))
    if policy.low_dtype is None:
        return
    key = {"autocast": "torch_autocast.dtype", "bf16": "bf16.enabled", "fp16": "fp16.enabled"}[policy.mode]
    found = f"{short_name(policy.low_dtype)} on device type {device_type}"
    if policy.mode == "autocast" and not torch.amp.is_autocast_available(device_type):
        raise ConfigError(
            f"{key} is {found}, which has no autocast (torch.amp.is_autocast_available). Use bf16 or fp16 instead."
        )
    is_bf16_on_cuda = device_type == "cuda" and policy.low_dtype == torch.bfloat16
    if is_bf16_on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise ConfigError(
            f"{key} is {found} ({name}), which has no bfloat16 arithmetic: that takes compute capability 8.0 or "
            "newer. Use float16."
        )
