"""Which fraction of its peak rates a GPU reaches, and the origin of these numbers.

The numbers are assumptions until a GPU is measured. Then they go into `MEASURED`, under the GPU's name in `GPUS`, with
an `origin` that names the record. `python -m benchmarks.gpu_check` prints them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zeroamp.dry_run.gpus import Gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Fractions of a GPU's peak rates that training reaches: each above 0, at most 1."""

    compute: float = 0.7
    """Fraction of the peak FLOP/s."""
    memory: float = 0.8
    """Fraction of the memory bandwidth."""
    network: float = 0.8
    """Fraction of the bandwidth of the links between GPUs."""
    origin: str = "as given"
    """The source of the numbers, as `plan` prints it: an assumption, a record, or the caller ("as given")."""


ASSUMED = Efficiency(origin="round assumptions, not measurements")
MEASURED: Mapping[str, Efficiency] = MappingProxyType({})
"""Name of a GPU in `GPUS` -> its measured efficiency. No GPU was measured yet."""


def efficiency_of(gpu: Gpu) -> Efficiency:
    """Return the measured efficiency of a GPU, or the assumed one if it was not measured."""
    return MEASURED.get(gpu.name, ASSUMED)
