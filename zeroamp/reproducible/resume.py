"""Checks whether a resumed run continues with the bits of the reproducible run that saved its checkpoint."""

from collections.abc import Iterator
from typing import Any

from zeroamp.policies.errors import shown
from zeroamp.policies.json_values import flatten
from zeroamp.policies.policy import Policy, policy_from_config
from zeroamp.policies.schema import known_part

_KEYS = (
    *("zeroamp.seed", "zeroamp.reduce", "zeroamp.overrides", "gradient_clipping"),
    *("torch_autocast", "bf16", "fp16", "data_types", "train_micro_batch_size_per_gpu"),
)
"""Config keys and blocks on which the bits depend, besides the number of micro-batches."""


def broken_bits(saved: dict[str, Any], saved_ranks: int, policy: Policy, num_ranks: int) -> str | None:
    """Return a clause that names why this run's bits differ from those of the run that saved a checkpoint.

    None if the configs do not show a difference, or if the run that saved was not reproducible.

    Args:
        saved: the config of the run that saved.
        saved_ranks: the number of ranks that saved.
        policy: the policy of this run.
        num_ranks: the number of ranks of this run.
    """
    if not saved.get("zeroamp", {}).get("reproducible"):
        return None
    if not policy.reproducible:
        return "zeroamp.reproducible is false here"
    before = policy_from_config(known_part(saved), world_size=saved_ranks)
    changes = list(_changes(before, saved_ranks, policy, num_ranks))
    return ", ".join(changes) or None


def _changes(before: Policy, saved_ranks: int, now: Policy, num_ranks: int) -> Iterator[str]:
    counts = [policy.gradient_accumulation_steps * ranks for policy, ranks in ((before, saved_ranks), (now, num_ranks))]
    if counts[0] != counts[1]:
        yield f"an optimizer step had {counts[0]} micro-batches on all ranks, and has {counts[1]} here"
    ours, theirs = flatten(now.to_config()), flatten(before.to_config())
    for key in dict.fromkeys([*theirs, *ours]):
        if key.startswith(_KEYS) and ours.get(key) != theirs.get(key):
            yield f"{key} was {shown(theirs.get(key))}, and is {shown(ours.get(key))} here"
    dtypes = [
        policy.communication_dtype if policy.communication_dtype.itemsize < policy.param_dtype.itemsize else None
        for policy in (before, now)
    ]
    if dtypes[0] != dtypes[1]:
        yield "communication_data_type rounds other gradients here"
