"""Whether a device, and this torch, have what a policy asks for: the low precision, NVTX, FSDP2's newer options."""

import torch

from zeroamp.hooks import has_reduction_options
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.policy import Policy


def check_torch(policy: Policy) -> None:
    """Raise ConfigError if `policy` asks for what FSDP2 of this torch cannot do."""
    asked = {
        "zeroamp.reduce_scatter_input_buffers": policy.reduce_scatter_input_buffers > 1,
        "zeroamp.separate_reduce_scatter_group": policy.separate_reduce_scatter_group,
    }
    for key in (key for key, is_asked in asked.items() if is_asked and not has_reduction_options()):
        remedy = "Leave it out, or install a newer torch."
        raise ConfigError(describe(key, f"torch {torch.__version__}", "torch 2.13 or newer, which has it", remedy))


def check_device(policy: Policy, device_type: str) -> None:
    """Raise ConfigError if `device_type` cannot compute in `policy.low_dtype`, or lacks the mode's autocast or NVTX.

    On CUDA bfloat16 counts only where the hardware has it: torch would emulate it, slowly, on older GPUs.
    """
    if policy.ranges == "nvtx" and device_type != "cuda":
        found = f'"nvtx" on device type {device_type}'
        remedy = 'Write "profiler": torch.profiler takes the ranges everywhere.'
        raise ConfigError(describe("zeroamp.ranges", found, '"nvtx" on cuda only', remedy))
    if policy.low_dtype is None:
        return
    key = {"autocast": "torch_autocast.dtype", "bf16": "bf16.enabled", "fp16": "fp16.enabled"}[policy.mode]
    found = f"{short_name(policy.low_dtype)} on device type {device_type}"
    if policy.mode == "autocast" and not torch.amp.is_autocast_available(device_type):
        valid = "a device type for which torch.amp.is_autocast_available() holds"
        raise ConfigError(describe(key, f"{found}, which has no autocast", valid, "Use bf16 or fp16 instead."))
    is_bf16_on_cuda = device_type == "cuda" and policy.low_dtype == torch.bfloat16
    if is_bf16_on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        valid = "float16, or a GPU of compute capability 8.0 or newer"
        raise ConfigError(describe(key, f"{found} ({name}), which has no such arithmetic", valid, "Use float16."))
