"""Specifications of GPUs, from the vendors' data sheets. Rates are dense: without structured sparsity."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zeroamp.policies.errors import ConfigError, describe


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Specifications of a GPU and of its usual links."""

    name: str
    memory_gb: float
    """Memory in 10^9 bytes, by the data sheet. Devices report more: an "80 GB" one has 79 GiB, which is 85 x 10^9
    bytes. The difference is a reserve for the driver's context, NCCL's buffers and fragmentation."""
    low_tflops: float
    """Peak rate of the matrix units in bf16 or fp16, in 10^12 operations per second."""
    tf32_tflops: float
    """The same in TF32, which torch uses for fp32 only if `torch.set_float32_matmul_precision` allows it. fp32 if the
    vendor has no TF32."""
    fp32_tflops: float
    """Peak rate in fp32, outside of the matrix units if they have no fp32."""
    memory_gb_per_s: float
    """Memory bandwidth in 10^9 bytes per second."""
    intra_gb_per_s: float
    """10^9 bytes per second to the other GPUs of the node, one direction."""
    inter_gb_per_s: float
    """10^9 bytes per second to other nodes, one direction, per GPU: one network card of the vendor's node."""
    source: str
    """Where the numbers are from."""

    @property
    def memory_bytes(self) -> int:
        """Return the memory in bytes, `memory_gb` x 10^9."""
        return int(self.memory_gb * 1e9)


_FIELDS = (
    *("memory_gb", "low_tflops", "tf32_tflops", "fp32_tflops"),
    *("memory_gb_per_s", "intra_gb_per_s", "inter_gb_per_s"),
)
_FIGURES = {
    "a100-40gb": (40, 312, 156, 19.5, 1555, 300, 25),
    "a100": (80, 312, 156, 19.5, 2039, 300, 25),
    "h100": (80, 989, 494, 67, 3350, 450, 50),
    "h200": (141, 989, 494, 67, 4800, 450, 50),
    "b200": (180, 2250, 1120, 75, 8000, 900, 50),
    "mi300x": (192, 1307, 653, 163, 5300, 448, 50),
    "l40s": (48, 362, 183, 91.6, 864, 32, 25),
}
_SOURCES = {
    "a100-40gb": "NVIDIA A100 data sheet (SXM: NVLink 600 GB/s both ways); DGX A100: one 200 Gb/s HDR card per GPU",
    "a100": "NVIDIA A100 80GB data sheet (SXM: NVLink 600 GB/s both ways); DGX A100: one 200 Gb/s HDR card per GPU",
    "h100": "NVIDIA H100 data sheet (SXM: NVLink 900 GB/s both ways); DGX H100: one 400 Gb/s NDR card per GPU",
    "h200": "NVIDIA H200 data sheet (SXM: NVLink 900 GB/s both ways); DGX H200: one 400 Gb/s NDR card per GPU",
    "b200": "NVIDIA DGX B200 data sheet, an eighth of it (NVLink 1.8 TB/s both ways, one 400 Gb/s card per GPU)",
    "mi300x": "AMD Instinct MI300X data sheet (seven links of 128 GB/s both ways); a 400 Gb/s card per GPU",
    "l40s": "NVIDIA L40S data sheet (PCIe 4.0 x16, 64 GB/s both ways); a 200 Gb/s card per GPU",
}
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        name: Gpu(name=name, source=_SOURCES[name], **dict(zip(_FIELDS, figures, strict=True)))
        for name, figures in _FIGURES.items()
    }
)
"""Name of a GPU, as `gpu=` and `--gpu` accept it -> its specifications."""


def find_gpu(name: str) -> Gpu:
    """Return the GPU of this name.

    Raises:
        ConfigError: `GPUS` has no such name.
    """
    if name in GPUS:
        return GPUS[name]
    valid = f"one of {', '.join(GPUS)}"
    remedy = "For another one, in Python: plan_run(..., gpu=zeroamp.Gpu(...))."
    raise ConfigError(describe("gpu", repr(name), valid, remedy))
