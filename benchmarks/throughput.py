"""FLOPs of a decoder's training, MFU, and the prediction of `plan` for the same step."""

from dataclasses import replace

import torch

import zeroamp
from benchmarks.peers.model import SHAPES, Decoder, Shape
from benchmarks.peers.options import Options
from benchmarks.peers.zeroamp import policy_of
from zeroamp.dry_run.run_plan import StagePlan
from zeroamp.policies.policy import Stage

BYTES_PER_GB = 1e9


def flops_per_token(shape: Shape, length: int) -> int:
    """Return the FLOPs of forward and backward for one token: 6 per weight of a matrix product, and those of attention.

    The formula is 6 (P - embedding) + 12 x layers x width x length, of PaLM (arXiv:2204.02311, appendix B). torchtitan
    counts in the same way. Attention counts as if it were not causal. Recomputation does not count.
    """
    head_width = shape.width // shape.heads
    of_attention = shape.width * head_width * (2 * shape.heads + 2 * shape.kv_heads)
    of_layer = of_attention + 3 * shape.width * shape.hidden + 2 * shape.width
    weights = shape.layers * of_layer + shape.width + shape.vocab * shape.width  # with the head, without the embedding
    return 6 * weights + 12 * shape.layers * shape.heads * head_width * length


def tokens_per_step(options: Options) -> int:
    """Return the tokens of one rank in an optimizer step."""
    return options.batch * options.length * options.micro_batches


def gpu_of(device: torch.device) -> zeroamp.Gpu | None:
    """Return the specifications of a device by its data sheet; None if zeroamp does not have them."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return gpu_named(properties.name, properties.total_memory)


def gpu_named(name: str, num_bytes: int) -> zeroamp.Gpu | None:
    """Return the specifications for a device's name and memory in bytes; None if zeroamp does not have them."""
    words = name.lower().replace("-", " ").split()
    for gpu in zeroamp.GPUS.values():
        model = gpu.name.partition("-")[0]
        if model in words and abs(num_bytes / BYTES_PER_GB / gpu.memory_gb - 1) < 0.2:
            return gpu
    return None


def mfu(options: Options, seconds: float, device: torch.device) -> float | None:
    """Return the MFU of a step of `seconds`: the fraction of the bf16 peak by the data sheet. None: unknown."""
    gpu = gpu_of(device)
    if gpu is None:
        return None
    flops = flops_per_token(SHAPES[options.model], options.length) * tokens_per_step(options)
    return flops / seconds / (gpu.low_tflops * 1e12)


def planned(
    options: Options,
    *,
    stage: Stage = 3,
    world_size: int,
    gpu: zeroamp.Gpu | None = None,
    efficiency: zeroamp.Efficiency | None = None,
) -> StagePlan:
    """Return the plan of `plan_run` for the engine `zeroamp <stage>` with these options."""
    with torch.device("meta"):
        model = Decoder(SHAPES[options.model], options.length)
    run = zeroamp.plan_run(
        model,
        policy_of(options, stage=stage),
        world_size=world_size,
        batch=options.batch,
        seq=options.length,
        stages=(stage,),
        checkpointing=options.checkpointing,
        # With almost no memory nothing fits, so `plan_run` tries no batch but the given one.
        gpu=replace(gpu or zeroamp.GPUS["h100"], memory_gb=1e-6),
        efficiency=efficiency,
        inputs=lambda batch, length: torch.zeros(batch, length, dtype=torch.int64),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
    )
    return run.stages[0]


def compute_efficiency(
    options: Options, seconds: float, *, world_size: int, gpu: zeroamp.Gpu, memory: float
) -> float | None:
    """Return the fraction of peak FLOP/s with which `plan` predicts this step time; None if there is none.

    Args:
        options: of a step without communication: one rank, or fake ranks.
        seconds: the measured time of a step.
        world_size: ranks of the step.
        gpu: specifications of the data sheet.
        memory: the fraction of the memory bandwidth that is reached.
    """
    low, high = 0.01, 1.0

    def predicted(compute: float) -> float:
        time = planned(
            options, world_size=world_size, gpu=gpu, efficiency=zeroamp.Efficiency(compute=compute, memory=memory)
        ).time
        return time.compute + time.optimizer

    if not predicted(high) <= seconds <= predicted(low):
        return None
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) > seconds else (low, middle)
    return round((low + high) / 2, 3)
