"""Batch sizes: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks."""

import os
from dataclasses import dataclass

from zeroamp.policies.errors import ConfigError, describe

_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """What a config says and what follows from it. None: neither said nor known."""

    total: int | None
    micro: int | None
    accumulation_steps: int


def resolve_batch_sizes(total: int | None, micro: int | None, steps: int | None, world_size: int | None) -> BatchSizes:
    """Derive what is missing, as DeepSpeed does: the accumulation steps first, then the micro-batch, then the total.

    `world_size` is the number of data-parallel ranks; None takes WORLD_SIZE from the environment, where torchrun sets
    it. Without either, what needs it stays None.

    Raises:
        ConfigError: the sizes do not multiply, or the accumulation steps cannot be known.
    """
    ranks = _world_size(world_size)
    if steps is None:
        steps = _accumulation_steps(total, micro, ranks)
    if total is not None and micro is None and ranks is not None:
        micro = _divide(total, steps * ranks, f"{steps} accumulation steps x {ranks} ranks")
    if total is None and micro is not None and ranks is not None:
        total = micro * steps * ranks
    sizes = BatchSizes(total=total, micro=micro, accumulation_steps=steps)
    check_batch_sizes(sizes, ranks)
    return sizes


def check_batch_sizes(sizes: BatchSizes, ranks: int | None) -> None:
    """Raise ConfigError unless the sizes multiply, over `ranks` ranks if that is known."""
    total, micro, steps = sizes.total, sizes.micro, sizes.accumulation_steps
    if total is None:
        return
    product = steps * (micro or 1) * (ranks or 1)
    is_whole = micro is not None and ranks is not None
    if total == product if is_whole else total % product == 0:
        return
    factors = {_MICRO: micro, _STEPS: steps, "ranks": ranks}
    known = " x ".join(f"{number} {name}" for name, number in factors.items() if number is not None)
    raise ConfigError(
        describe(
            _TOTAL,
            f"{total}",
            f"{product} = {known}" if is_whole else f"a multiple of {product} = {known}",
            "Change one of them, or leave one out: it is derived. On a mesh of fewer ranks than the job has, pass "
            "world_size=mesh.size() to policy_from_config.",
        )
    )


def _accumulation_steps(total: int | None, micro: int | None, ranks: int | None) -> int:
    if total is None or micro is None:
        return 1
    if ranks is None:
        raise ConfigError(
            describe(
                _STEPS,
                f"no value beside {_TOTAL} {total} and {_MICRO} {micro}, and no number of ranks to derive it from",
                "a value, or a known number of ranks",
                "Pass world_size= to policy_from_config (--world-size on the command line), start with torchrun, or "
                "set the key.",
            )
        )
    return _divide(total, micro * ranks, f"{_MICRO} {micro} x {ranks} ranks")


def _divide(total: int, factor: int, words: str) -> int:
    if total % factor:
        raise ConfigError(
            describe(_TOTAL, f"{total}", f"a multiple of {factor} = {words}", "Change one of them; nothing is rounded.")
        )
    return total // factor


def _world_size(asked: int | None) -> int | None:
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
            found = f"{type(asked).__name__} {asked!r}"
            raise ConfigError(describe("the argument world_size", found, "a whole number from 1 on", "Pass the ranks."))
        return asked
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
