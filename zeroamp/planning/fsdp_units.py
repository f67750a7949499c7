"""Chooses the FSDP units of a model, and merges small ones.

Reads the module tree and shapes only.

[Note: Merging by default]
The collectives of a small unit cost their latency, not their bytes. So small neighbouring units are merged if the
config does not set `reduce_bucket_size`. Larger units are not merged: each is communicated while others compute.

* At stages 0 to 2 all parameters are unsharded from the first forward of an optimizer step to its last backward. So a
  merged unit adds no unsharded parameters. It adds the gradients and the reduction's buffers of one unit of at most
  `SMALL` elements.
* At stage 3 all modules of a merged unit are unsharded, and have gradients, at the same time. So a merged unit has at
  most `SMALL` elements, and at most `1 / STAGE_3_PART` of the elements of the largest unit, embedding or head. The
  peak of memory is then still where the largest unit is. In a model of equal blocks, nothing is merged.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from zeroamp.policies.auto_wrap import AutoWrapPolicy, find_leaf_modules, find_units
from zeroamp.policies.policy import Policy

logger = logging.getLogger("zeroamp")

Merged = Mapping[str, tuple[str, ...]]

SMALL = 4_000_000
"""Largest number of elements of a unit that is merged by default. Measurements: `benchmarks/NOTES.md`."""
STAGE_3_PART = 16
"""At stage 3 a unit that is merged by default has at most 1 / 16 of the elements of the largest unit."""


def plan_units(
    model: nn.Module, policy: Policy, auto_wrap_policy: AutoWrapPolicy = None
) -> tuple[tuple[str, ...], Merged]:
    """Return the FQNs of the units below the root, children before parents, and the modules of merged units.

    Raises:
        WrapError: the wrap policy matches nothing.
        ConfigError: `policy.leaf_modules` matches no module.
    """
    units = find_units(model, auto_wrap_policy, leaf_modules=policy.leaf_modules)
    if policy.stage == 3 and not units:
        logger.warning(
            "%s has no units below its root: at stage 3 all of its parameters are unsharded at once. Name its blocks "
            "with auto_wrap_policy to save memory.",
            type(model).__name__,
        )
    merged = _merge(model, units, policy)
    absorbed = {fqn for fqns in merged.values() for fqn in fqns[1:]}
    return tuple(fqn for fqn in units if fqn not in absorbed), merged


def _merge(model: nn.Module, units: Sequence[str], policy: Policy) -> Merged:
    """Join neighbouring units greedily, in registration order, while they have at most `reduce_bucket_size` elements.

    Not merged are units that contain others, modules that are registered twice (`run_order` could not determine when
    the merged unit ends), and leaf modules (a forward runs only some of their sparse experts).
    """
    bucket_size = policy.reduce_bucket_size
    if bucket_size is None:
        bucket_size = _default_bucket_size(model, units, policy.stage)
    if bucket_size <= 0:
        return {}
    modules = {model.get_submodule(fqn): fqn for fqn in units}
    num_paths = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    leaf_modules = set(find_leaf_modules(model, policy.leaf_modules))
    runs: list[list[str]] = []
    in_run: set[nn.Parameter] = set()
    numel = 0  # of `in_run`
    is_open = False  # whether a unit may be added to the last run
    for module in model.modules():
        if (fqn := modules.get(module)) is None:
            continue
        own = set(module.parameters())
        can_merge = num_paths[module] == 1 and fqn not in leaf_modules and _contains_no_other(module, modules)
        is_sibling = can_merge and is_open and runs[-1][0].rpartition(".")[0] == fqn.rpartition(".")[0]
        num_more = sum(parameter.numel() for parameter in own - in_run)
        if is_sibling and numel + num_more <= bucket_size:
            runs[-1].append(fqn)
            in_run |= own
            numel += num_more
        else:
            runs.append([fqn])
            in_run, is_open = own, can_merge
            numel = sum(parameter.numel() for parameter in own)
    return {run[0]: tuple(run) for run in runs if len(run) > 1}


def _default_bucket_size(model: nn.Module, units: Sequence[str], stage: int) -> int:
    """Return the bucket size that is used if the config sets none: see [Note: Merging by default]."""
    if stage < 3:
        return SMALL
    # Embeddings and heads may be units of their own: see `zeroamp.planning.own_units`.
    others = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.Linear))
    modules = (*map(model.get_submodule, units), *others)
    largest = max((sum(parameter.numel() for parameter in module.parameters()) for module in modules), default=0)
    return min(SMALL, largest // STAGE_3_PART)


def _contains_no_other(module: nn.Module, units: Mapping[nn.Module, str]) -> bool:
    return sum(inner in units for inner in module.modules()) == 1
