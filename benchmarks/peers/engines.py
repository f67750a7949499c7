"""All engines by name."""

from collections.abc import Callable

from benchmarks.peers import ddp, deepspeed, fsdp2, zeroamp
from benchmarks.peers.engine import Engine, Setup

ENGINES: dict[str, Callable[[Setup], Engine]] = {
    **zeroamp.ENGINES,
    **fsdp2.ENGINES,
    **ddp.ENGINES,
    **deepspeed.ENGINES,
}
AGAIN = " again"
"""Suffix of a name: the same engine once more, which shows the noise of the method."""
DEFAULT_ENGINES = (*ENGINES, f"FSDP2 bf16 reshard{AGAIN}")
DEFAULT_BASES = ("DDP autocast", "FSDP2 bf16 reshard", "FSDP2 bf16 no reshard", "FSDP2 autocast reshard")


def builder(name: str) -> Callable[[Setup], Engine]:
    """Return the function that builds the engine with a name.

    Raises:
        SystemExit: there is no such engine.
    """
    known = name.removesuffix(AGAIN)
    engines = ENGINES | zeroamp.VARIANTS
    if known not in engines:
        raise SystemExit(f"--engines: {name!r} is not one of {', '.join(engines)}")
    return engines[known]
