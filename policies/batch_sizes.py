"""Derives and checks batch sizes.

train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks.
"""

from zeroamp.policies.errors import ConfigError, describe, shown
from zeroamp.policies.numbers import WORLD_SIZE, is_integer, size_from_launcher

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TOTAL, _MICRO, _STEPS = BATCH_SIZES


def resolve_batch_sizes(
    total: int | None, micro: int | None, steps: int | None, ranks: int | None
) -> tuple[int | None, int | None, int]:
    """Derive the missing sizes as DeepSpeed does: first the accumulation steps, then the micro-batch, then the total.

    Without the number of data-parallel ranks, sizes that depend on it stay None.

    Args:
        total: samples per optimizer step, over all ranks; None if missing.
        micro: samples per micro-batch and rank; None if missing.
        steps: micro-batches per optimizer step and rank; None if missing.
        ranks: data-parallel ranks; None if not known.

    Returns:
        (total, micro, steps).

    Raises:
        ConfigError: the total is not the product of the others, or the accumulation steps cannot be derived.
    """
    if steps is None:
        steps = _accumulation_steps(total, micro, ranks)
    if total is not None and micro is None and ranks is not None:
        micro = _divide(total, steps * ranks, f"{steps} accumulation steps x {ranks} ranks")
    if total is None and micro is not None and ranks is not None:
        total = micro * steps * ranks
    check_batch_sizes(total, micro, steps, ranks)
    return total, micro, steps


def check_batch_sizes(total: int | None, micro: int | None, steps: int, ranks: int | None) -> None:
    """Raise ConfigError if `total` is not `micro` x `steps` x `ranks`.

    If `micro` or `ranks` is unknown (None), `total` must be a multiple of the product of the others.
    """
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
            "Change one of them, or leave one out, and it is derived. If only some of the job's "
            "ranks get different samples (a smaller mesh; tensor or context parallelism), pass the number of these "
            "ranks as world_size= to policy_from_config: docs/meshes.md.",
        )
    )


def _accumulation_steps(total: int | None, micro: int | None, ranks: int | None) -> int:
    if total is None or micro is None:
        return 1
    if ranks is None:
        raise ConfigError(
            f"{_STEPS} is missing and cannot be derived from {_TOTAL} {total} and {_MICRO} {micro} without the number "
            "of ranks. Pass world_size= to policy_from_config (--world-size on the command line), start with torchrun, "
            "or set the key."
        )
    return _divide(total, micro * ranks, f"{_MICRO} {micro} x {ranks} ranks")


def _divide(total: int, factor: int, words: str) -> int:
    if total % factor:
        valid = f"a multiple of {factor} = {words}"
        remedy = "Change one of them: sizes are not rounded."
        raise ConfigError(describe(_TOTAL, f"{total}", valid, remedy))
    return total // factor


def data_parallel_ranks(world_size: int | None) -> int | None:
    """Return `world_size`, or without it WORLD_SIZE of the environment, which torchrun sets; None without both.

    Raises:
        ConfigError: `world_size`, or the environment's, is not a whole number from 1 on.
    """
    if world_size is None:
        return size_from_launcher(WORLD_SIZE)
    if not is_integer(world_size, at_least=1):
        valid = "a whole number from 1 on"
        raise ConfigError(describe("the argument world_size", shown(world_size), valid, "Pass the number of ranks."))
    return world_size
