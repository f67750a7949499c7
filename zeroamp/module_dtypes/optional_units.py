"""Finds the modules that `zeroamp.optional_units` names: those that only some ranks run in a step.

A unit that one rank runs and another does not would be all-gathered and reduced on the first rank only. So these
modules, and the modules inside them, are no units. Their parameters belong to the unit around them, which each rank
runs: FSDP2 unshards them in its forward, and each rank reduces them at the end of its backward, with zeros where they
were not used (see [Note: Zeros for unused parameters]).
"""

from torch import nn

from zeroamp.module_dtypes.patterns import find_matches, known_names
from zeroamp.policies.errors import ConfigError, nearest
from zeroamp.policies.policy import Policy

KEY = "zeroamp.optional_units"


def find_optional(model: nn.Module, policy: Policy) -> set[nn.Module]:
    """Return the modules that `zeroamp.optional_units` names, and the modules inside them.

    See `zeroamp.module_dtypes.patterns` for patterns.

    Raises:
        ConfigError: a pattern matches no module, or the root.
    """
    found: set[nn.Module] = set()
    for pattern in policy.optional_units:
        matches = find_matches(model, pattern).modules
        if "" in matches:
            raise ConfigError(
                f"{KEY}: {pattern!r} matches the root, {type(model).__name__}, which runs on each rank. Name modules "
                "inside it."
            )
        if not matches:
            hint = nearest(pattern, known_names(model))
            raise ConfigError(
                f"{KEY}: {pattern!r} matches no module or class of {type(model).__name__}. {hint and f'{hint} '}"
                "Print model.named_modules() to see names and classes."
            )
        found.update(inner for fqn in matches for inner in model.get_submodule(fqn).modules())
    return found
