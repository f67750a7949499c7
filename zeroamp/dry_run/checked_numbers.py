"""The arguments of `plan_run` that are numbers, looked at before anything is computed from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from numbers import Integral, Real
from typing import Any

from zeroamp.dry_run.gpus import Gpu
from zeroamp.dry_run.roofline import Efficiency
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.policy import Stage

STAGES: tuple[Stage, ...] = (0, 1, 2, 3)


def check_counts(**values: int | None) -> None:
    """Check numbers of ranks, samples, tokens and the like. None is a default.

    Raises:
        ConfigError: one is no whole number, or is less than 1.
    """
    for name, value in values.items():
        if value is not None and not (_is_whole(value) and value >= 1):
            raise _refused(name, value, "a whole number >= 1")


def check_mesh(mesh: Sequence[int] | None) -> None:
    """Check what is said of the mesh, apart from the number of ranks.

    Raises:
        ConfigError: it is no pair of whole numbers, or one is less than 1.
    """
    if mesh is not None and not (len(mesh) == 2 and all(_is_whole(size) and size >= 1 for size in mesh)):
        raise _refused("mesh", mesh, "(replicas, shards), each >= 1, or None")


def check_stages(stages: Sequence[Stage]) -> None:
    """Check the stages to compare.

    Raises:
        ConfigError: there is none, or one that ZeRO has not.
    """
    if not stages or not all(_is_whole(stage) and stage in STAGES for stage in stages):
        raise _refused("stages", stages, f"one or more of {', '.join(map(str, STAGES))}")


def check_speeds(gpu: Gpu, efficiency: Efficiency, **bandwidths: float | None) -> None:
    """Check figures of the GPU, bandwidths (None is a default), and the parts of them that are reached.

    Raises:
        ConfigError: one is no positive number, or more than the whole is reached.
    """
    figures = {f"gpu.{name}": value for name, value in asdict(gpu).items() if not isinstance(value, str)}
    given = {name: value for name, value in bandwidths.items() if value is not None}
    _check_positive({**given, **figures}, math.inf, "a positive number")
    parts = {f"efficiency.{name}": value for name, value in asdict(efficiency).items()}
    _check_positive(parts, 1, "a number above 0, at most 1")


def _check_positive(values: Mapping[str, Any], most: float, valid: str) -> None:
    for name, value in values.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not (is_number and 0 < value <= most and math.isfinite(value)):
            raise _refused(name, value, valid)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _refused(name: str, found: object, valid: str) -> ConfigError:
    return ConfigError(describe(f"plan_run({name}=)", repr(found), valid, "Change it."))
