"""Which part of its peaks an accelerator reaches, and where the number is from.

Assumptions, as long as nothing was measured. A measurement goes into `MEASURED`, under the accelerator's name in
`GPUS`, with an `origin` that names its record: `python -m benchmarks.gpu_check` prints the numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zeroamp.dry_run.gpus import Gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """The part of the peaks that is reached: each above 0, at most 1."""

    compute: float = 0.7
    memory: float = 0.8
    network: float = 0.8
    origin: str = "as given"
    """Where the numbers are from, in words that follow them: an assumption, a record of a measurement, the caller."""


ASSUMED = Efficiency(origin="round assumptions, not measurements")
MEASURED: Mapping[str, Efficiency] = MappingProxyType({})
"""Name of an accelerator in `GPUS` -> what was measured on it. Nothing was measured yet."""


def efficiency_of(gpu: Gpu) -> Efficiency:
    """Return what was measured on an accelerator, or the assumption."""
    return MEASURED.get(gpu.name, ASSUMED)
