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
VARIANTS = zeroamp.VARIANTS
AGAIN = " again"
"""After a name: the same engine once more, which shows what the method can tell apart."""
DEFAULT_ENGINES = (*ENGINES, f"FSDP2 bf16 reshard{AGAIN}")
DEFAULT_BASES = ("FSDP2 bf16 reshard", "FSDP2 bf16 no reshard", "FSDP2 autocast reshard")


def builder(name: str) -> Callable[[Setup], Engine]:
    """Return what builds the engine of a name.

    Raises:
        SystemExit: there is none.
    """
    known = name.removesuffix(AGAIN)
    engines = ENGINES | VARIANTS | fsdp2.VARIANTS
    if known not in engines:
        raise SystemExit(f"--engines: {name!r} is none of {', '.join(engines)}")
    return engines[known]
