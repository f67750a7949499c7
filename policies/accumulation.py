"""Decides the dtype in which gradients accumulate. `conflicts.py` refuses some."""

import torch

from zeroamp.policies.derived import Mode
from zeroamp.policies.policy import Policy
from zeroamp.policies.schema.zero import Stage

COMPUTE: tuple[tuple[Mode, torch.dtype | None], ...] = (
    ("fp32", None),
    ("bf16", torch.bfloat16),
    ("fp16", torch.float16),
    ("autocast", torch.bfloat16),
    ("autocast", torch.float16),
)
"""(mode, low dtype) of each kind of compute."""
ACCUMULATE = (torch.float32, torch.bfloat16, torch.float16)
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)


def accumulation_dtype(policy: Policy) -> torch.dtype:
    """Return the dtype in which the gradients of several micro-batches are summed; fp32 for steps of one."""
    several = policy.gradient_accumulation_steps > 1 or policy.is_of_pipeline
    return policy.grad_accum_dtype if several else torch.float32


def unsharded_accumulation(policy: Policy) -> torch.dtype:
    """Return the dtype in which FSDP2 sums unsharded gradients over the config's micro-batches.

    fp32 if there is no such sum: at stages 2 and 3 without a pipeline, and with one micro-batch per optimizer step.
    """
    return accumulation_dtype(policy) if policy.stage < 2 or policy.is_of_pipeline else torch.float32


def sharded_accumulation(policy: Policy) -> torch.dtype:
    """Return the dtype in which sharded gradients are summed over several micro-batches; fp32 where none are summed."""
    return policy.grad_accum_dtype if policy.stage >= 2 and not policy.is_of_pipeline else torch.float32
