"""zeroamp: bf16 autocast at all stages, with `TrainStep` or in a plain loop."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import zeroamp
from benchmarks.peers.engine import Engine, Setup, mean
from benchmarks.peers.options import Options

EVERYTHING = 10**12  # elements: more than any model here has
PREFETCHED = 50_000_000  # elements: DeepSpeed's default
SIZES = {
    "stage3_max_live_parameters": 10**9,
    "stage3_prefetch_bucket_size": PREFETCHED,
}
"""DeepSpeed's defaults, in elements, for live parameters, prefetching and reduction buckets. zeroamp's are 0."""


def policy_of(
    options: Options, *, stage: int, zero: dict[str, Any] | None = None, own: dict[str, Any] | None = None
) -> zeroamp.Policy:
    """Return the policy of a stage. `zero` and `own` add to the blocks "zero_optimization" and "zeroamp"."""
    return zeroamp.policy_from_config(
        {
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "zero_optimization": {"stage": stage, **(zero or {})},
            "gradient_accumulation_steps": options.micro_batches,
            "gradient_clipping": options.clip,
            "zeroamp": own or {},
        }
    )


def build(
    setup: Setup,
    *,
    stage: int,
    zero: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    has_plain_loop: bool = False,
) -> Engine:
    """Wrap a model. `zero` and `own` add to the blocks "zero_optimization" and "zeroamp"."""
    policy = policy_of(setup.options, stage=stage, zero=zero, own=own)
    model = zeroamp.wrap_model(setup.model(), policy)
    optimizer = setup.optimizer(model)
    train = None if has_plain_loop else zeroamp.TrainStep(model, optimizer)

    def step() -> torch.Tensor:
        if train is None:
            return _plain_step(setup, model, optimizer)
        losses = []
        for tokens in setup.micro_batches:
            losses.append(model(tokens))
            train.backward(losses[-1])
            train.step()
        return mean(losses)

    # What zeroamp counts as one all-reduce are an all-to-all and an all-gather.
    own_count = None if stage == 0 else zeroamp.traffic(model).by_dtype
    return Engine(step=step, own_count=own_count)


def _plain_step(setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Take a step as a loop for FSDP2 does."""
    assert isinstance(model, FSDPModule)
    losses = []
    for index, tokens in enumerate(setup.micro_batches, start=1):
        model.set_requires_gradient_sync(index == len(setup.micro_batches))
        losses.append(model(tokens))
        (losses[-1] / len(setup.micro_batches)).backward()
    if setup.options.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), setup.options.clip)
    optimizer.step()
    optimizer.zero_grad()
    return mean(losses)


ENGINES = {
    "zeroamp 0": partial(build, stage=0),
    "zeroamp 1": partial(build, stage=1),
    "zeroamp 2": partial(build, stage=2),
    "zeroamp 3": partial(build, stage=3),
    "zeroamp 3 live": partial(build, stage=3, zero={"stage3_max_live_parameters": EVERYTHING}),
    "zeroamp 3 prefetch": partial(build, stage=3, zero={"stage3_prefetch_bucket_size": PREFETCHED}),
    "zeroamp 3 native": partial(build, stage=3, own={"reduce_accumulate_dtype": "native"}),
}

VARIANTS = {
    **{f"zeroamp {stage} plain loop": partial(build, stage=stage, has_plain_loop=True) for stage in range(4)},
    "zeroamp 2 sizes of DeepSpeed": partial(build, stage=2, zero=SIZES),
    "zeroamp 3 sizes of DeepSpeed": partial(build, stage=3, zero=SIZES),
    "zeroamp 2 reproducible": partial(build, stage=2, own={"reproducible": True}),
    "zeroamp 3 reproducible": partial(build, stage=3, own={"reproducible": True}),
    "zeroamp 3 hpZ": partial(build, stage=3, zero={"zero_hpz_partition_size": 2}),  # needs more than two ranks
}
"""Variants that set one key, to measure its effect. By name only (`--engines`)."""
