"""What `zeroamp.param_gather_dtype` may not be combined with in a config, each as a row of a table.

`docs/float8.md` has the table, which a test makes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zeroamp.policies.errors import ConfigError

if TYPE_CHECKING:
    from zeroamp.policies.policy import Policy

KEY = "zeroamp.param_gather_dtype"
SCALES = "float8 scales"
"""The group name of the all-reduce of the scales: see `zeroamp/float8/scaled_weights.py`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """A setting that float8 all-gathers are not built for."""

    name: str
    why: str
    """What would go wrong."""
    instead: str
    applies: Callable[["Policy"], bool]


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        name="no low precision (mode fp32)",
        why="the Linears would compute in fp32 with weights of 4 bits of precision",
        instead="Enable torch_autocast with bfloat16, or bf16.",
        applies=lambda policy: policy.low_dtype is None,
    ),
    Conflict(
        name="float16 compute",
        why="a float8 value divided by its scale does not fit the range of float16",
        instead="Use bfloat16.",
        applies=lambda policy: policy.low_dtype == torch.float16,
    ),
    Conflict(
        name="zero_optimization.stage 0",
        why="no parameter is all-gathered",
        instead="Use stage 1, 2 or 3.",
        applies=lambda policy: policy.stage == 0,
    ),
    Conflict(
        name="zero_optimization.zero_hpz_partition_size",
        why="FSDP2 cannot all-gather a weight in another dtype from a secondary partition",
        instead="Remove one of the two keys.",
        applies=lambda policy: policy.hpz_partition_size > 1,
    ),
    Conflict(
        name="zero_optimization.offload_param",
        why="the scales would have to be computed on the CPU in each step",
        instead="Remove one of the two keys.",
        applies=lambda policy: policy.offload.to_cpu,
    ),
)
"""All that a config can ask for and that is not built, in the order in which it is looked for."""


def check_float8(policy: "Policy") -> None:
    """Raise ConfigError for the first row of `CONFLICTS` that applies to a policy with `KEY`."""
    for conflict in CONFLICTS:
        if conflict.applies(policy):
            raise ConfigError(
                f'{KEY} is "{policy.config.zeroamp.param_gather_dtype}", which is not supported with {conflict.name}: '
                f"{conflict.why}. {conflict.instead}"
            )
