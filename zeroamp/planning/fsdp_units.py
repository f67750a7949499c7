"""Which modules are units, unsharded and reduced together.

Pure: reads the module tree and shapes only.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from zeroamp.policies.auto_wrap import AutoWrapPolicy, find_leaf_modules, find_units
from zeroamp.policies.policy import Policy

logger = logging.getLogger("zeroamp")

Merged = Mapping[str, tuple[str, ...]]


def plan_units(
    model: nn.Module, policy: Policy, auto_wrap_policy: AutoWrapPolicy = None
) -> tuple[tuple[str, ...], Merged]:
    """Return the units below the root, children before parents, and the modules of those that are merged.

    Raises:
        WrapError: the wrap policy matches nothing.
        ConfigError: no module is what `policy.leaf_modules` names.
    """
    units = find_units(model, auto_wrap_policy, leaf_modules=policy.leaf_modules)
    if policy.stage == 3 and not units:
        logger.warning(
            "no units below the root of %s: at stage 3 all of it is unsharded at once. Name its blocks with "
            "auto_wrap_policy to save memory.",
            type(model).__name__,
        )
    merged = _merge(model, units, policy)
    absorbed = {fqn for fqns in merged.values() for fqn in fqns[1:]}
    return tuple(fqn for fqn in units if fqn not in absorbed), merged


def _merge(model: nn.Module, units: Sequence[str], policy: Policy) -> Merged:
    """Join neighbouring units greedily, in registration order, while their elements together fit the bucket.

    Left alone are units that contain others; modules that are registered twice, since FSDP2 takes a merged unit for
    finished once each of its modules ran; and leaf modules: of sparse experts, a forward runs only some.
    """
    if policy.reduce_bucket_size <= 0:
        return {}
    modules = {model.get_submodule(fqn): fqn for fqn in units}
    num_paths = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    leaf_modules = set(find_leaf_modules(model, policy.leaf_modules))
    runs: list[list[str]] = []
    in_run: set[nn.Parameter] = set()
    numel = 0  # of these
    is_open = False  # whether the last run can take another
    for module in model.modules():
        if (fqn := modules.get(module)) is None:
            continue
        own = set(module.parameters())
        can_merge = num_paths[module] == 1 and fqn not in leaf_modules and _contains_no_other(module, modules)
        is_sibling = can_merge and is_open and runs[-1][0].rpartition(".")[0] == fqn.rpartition(".")[0]
        num_more = sum(parameter.numel() for parameter in own - in_run)
        if is_sibling and numel + num_more <= policy.reduce_bucket_size:
            runs[-1].append(fqn)
            in_run |= own
            numel += num_more
        else:
            runs.append([fqn])
            in_run, is_open = own, can_merge
            numel = sum(parameter.numel() for parameter in own)
    return {run[0]: tuple(run) for run in runs if len(run) > 1}


def _contains_no_other(module: nn.Module, units: Mapping[nn.Module, str]) -> bool:
    return sum(inner in units for inner in module.modules()) == 1
