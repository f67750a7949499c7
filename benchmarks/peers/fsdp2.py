"""Plain FSDP2: every block and the root is a unit. Every micro-batch is reduced, as at ZeRO stages 2 and 3."""

from contextlib import nullcontext
from functools import partial

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.peers.engine import Engine, Setup, mean

ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
BF16_WITH_FP32_SUM = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)


def build(setup: Setup, *, precision: MixedPrecisionPolicy, reshard: bool) -> Engine:
    """Shard a model. With fp32 parameters its forward runs under torch.autocast.

    `reshard`: of the blocks. The root then has FSDP2's default, which is not to reshard it. Records before 2026-11-26
    reshard the root too.
    """
    model = setup.model()
    for block in model.blocks:
        fully_shard(block, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=precision, reshard_after_forward=None if reshard else False)
    optimizer = setup.optimizer(model)
    parameters = list(model.parameters())

    def step() -> torch.Tensor:
        losses = []
        for tokens in setup.micro_batches:
            with setup.autocast() if precision is FP32 else nullcontext():
                losses.append(model(tokens))
            (losses[-1] / len(setup.micro_batches)).backward()
        if setup.options.clip:
            torch.nn.utils.clip_grad_norm_(parameters, setup.options.clip)
        optimizer.step()
        optimizer.zero_grad()
        return mean(losses)

    return Engine(step=step)


ENGINES = {
    "FSDP2 bf16 reshard": partial(build, precision=ALL_BF16, reshard=True),
    "FSDP2 bf16 fp32 reduce": partial(build, precision=BF16_WITH_FP32_SUM, reshard=True),
    "FSDP2 bf16 no reshard": partial(build, precision=ALL_BF16, reshard=False),
    "FSDP2 autocast reshard": partial(build, precision=FP32, reshard=True),
    "FSDP2 autocast no reshard": partial(build, precision=FP32, reshard=False),
}
