"""Figures of accelerators, from their makers' data sheets. Dense figures: without structured sparsity."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zeroamp.policies.errors import ConfigError, describe


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator, and the links that it usually has."""

    name: str
    memory_gb: float
    """In 10^9 bytes, as the data sheet says it. Devices report more (an "80 GB" one 79 GiB, which is 85 x 10^9 bytes);
    the difference is left to the driver's context, the collectives' own buffers and fragmentation."""
    low_tflops: float
    """10^12 operations per second in bf16 or fp16, in matrix units."""
    tf32_tflops: float
    """The same in TF32 (fp32 where the maker has no TF32), which torch uses for fp32 only if it is told to."""
    fp32_tflops: float
    """The same in fp32 proper, outside of the matrix units where these have none."""
    memory_gb_per_s: float
    intra_gb_per_s: float
    """To the other accelerators of the node, one direction."""
    inter_gb_per_s: float
    """To other nodes, one direction and per accelerator: the network card that the maker's own node has for each."""
    source: str

    @property
    def memory_bytes(self) -> int:
        """Return the memory in bytes."""
        return int(self.memory_gb * 1e9)


def _gpus(*gpus: Gpu) -> Mapping[str, Gpu]:
    return MappingProxyType({gpu.name: gpu for gpu in gpus})


GPUS = _gpus(
    Gpu(
        name="a100-40gb",
        memory_gb=40,
        low_tflops=312,
        tf32_tflops=156,
        fp32_tflops=19.5,
        memory_gb_per_s=1555,
        intra_gb_per_s=300,
        inter_gb_per_s=25,
        source="NVIDIA A100 data sheet (SXM: NVLink 600 GB/s both ways); DGX A100: one 200 Gb/s HDR card per GPU",
    ),
    Gpu(
        name="a100",
        memory_gb=80,
        low_tflops=312,
        tf32_tflops=156,
        fp32_tflops=19.5,
        memory_gb_per_s=2039,
        intra_gb_per_s=300,
        inter_gb_per_s=25,
        source="NVIDIA A100 80GB data sheet (SXM: NVLink 600 GB/s both ways); DGX A100: one 200 Gb/s HDR card per GPU",
    ),
    Gpu(
        name="h100",
        memory_gb=80,
        low_tflops=989,
        tf32_tflops=494,
        fp32_tflops=67,
        memory_gb_per_s=3350,
        intra_gb_per_s=450,
        inter_gb_per_s=50,
        source="NVIDIA H100 data sheet (SXM: NVLink 900 GB/s both ways); DGX H100: one 400 Gb/s NDR card per GPU",
    ),
    Gpu(
        name="h200",
        memory_gb=141,
        low_tflops=989,
        tf32_tflops=494,
        fp32_tflops=67,
        memory_gb_per_s=4800,
        intra_gb_per_s=450,
        inter_gb_per_s=50,
        source="NVIDIA H200 data sheet (SXM: NVLink 900 GB/s both ways); DGX H200: one 400 Gb/s NDR card per GPU",
    ),
    Gpu(
        name="b200",
        memory_gb=180,
        low_tflops=2250,
        tf32_tflops=1120,
        fp32_tflops=75,
        memory_gb_per_s=8000,
        intra_gb_per_s=900,
        inter_gb_per_s=50,
        source="NVIDIA DGX B200 data sheet, an eighth of it (NVLink 1.8 TB/s both ways, one 400 Gb/s card per GPU)",
    ),
    Gpu(
        name="mi300x",
        memory_gb=192,
        low_tflops=1307,
        tf32_tflops=653,
        fp32_tflops=163,
        memory_gb_per_s=5300,
        intra_gb_per_s=448,
        inter_gb_per_s=50,
        source="AMD Instinct MI300X data sheet (seven links of 128 GB/s both ways); a 400 Gb/s card per GPU",
    ),
    Gpu(
        name="l40s",
        memory_gb=48,
        low_tflops=362,
        tf32_tflops=183,
        fp32_tflops=91.6,
        memory_gb_per_s=864,
        intra_gb_per_s=32,
        inter_gb_per_s=25,
        source="NVIDIA L40S data sheet (PCIe 4.0 x16, 64 GB/s both ways); a 200 Gb/s card per GPU",
    ),
)
"""By the names that `gpu=` and `--gpu` take."""


def find_gpu(name: str) -> Gpu:
    """Return the accelerator of a name.

    Raises:
        ConfigError: there is none.
    """
    if name in GPUS:
        return GPUS[name]
    valid = f"one of {', '.join(GPUS)}"
    raise ConfigError(describe("gpu", repr(name), valid, "For another one, pass a zeroamp.Gpu of its figures."))
