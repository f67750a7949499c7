"""FLOPs of a decoder's training, MFU, and the plan of the same step."""

import torch

import zeroamp
from benchmarks.peers.model import SHAPES, Decoder, Shape
from benchmarks.peers.options import Options
from benchmarks.peers.zeroamp import policy_of
from zeroamp.dry_run.planned_run import StagePlan
from zeroamp.policies.policy import Stage

BF16_TFLOPS = {"a100": 312, "h100": 989, "h200": 989, "b200": 2250, "mi300x": 1307, "l40s": 362}
"""GPU -> its peak in bf16, in 10^12 FLOP/s without structured sparsity, by the vendor's data sheet."""


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


def peak_of(device: torch.device) -> float | None:
    """Return the peak FLOP/s of a device in bf16, by its data sheet; None if it is not in `BF16_TFLOPS`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_properties(device).name  # such as "NVIDIA H100 80GB HBM3"
    words = name.lower().replace("-", " ").split()
    return next((1e12 * tflops for gpu, tflops in BF16_TFLOPS.items() if gpu in words), None)


def mfu(options: Options, seconds: float, device: torch.device) -> float | None:
    """Return the MFU of a step of `seconds`: the fraction of the bf16 peak by the data sheet. None: unknown."""
    peak = peak_of(device)
    if peak is None:
        return None
    flops = flops_per_token(SHAPES[options.model], options.length) * tokens_per_step(options)
    return flops / seconds / peak


def planned(
    options: Options,
    *,
    stage: Stage = 3,
    world_size: int,
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
        gpu=1e-6,
        inputs=lambda batch, length: torch.zeros(batch, length, dtype=torch.int64),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
    )
    return run.stages[0]
