"""zeroamp: bf16 autocast at stages 1, 2 and 3."""

from functools import partial
from typing import Any

import torch

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
) -> Engine:
    """Wrap a model. `zero` and `own` add to the blocks "zero_optimization" and "zeroamp"."""
    policy = policy_of(setup.options, stage=stage, zero=zero, own=own)
    model = zeroamp.wrap_model(setup.model(), policy)
    train = zeroamp.TrainStep(model, setup.optimizer(model))

    def step() -> torch.Tensor:
        losses = []
        for tokens in setup.micro_batches:
            losses.append(model(tokens))
            train.backward(losses[-1])
            train.step()
        return mean(losses)

    traffic = zeroamp.traffic(model)
    return Engine(step=step, own_count=traffic.by_dtype)


ENGINES = {
    "zeroamp 1": partial(build, stage=1),
    "zeroamp 2": partial(build, stage=2),
    "zeroamp 3": partial(build, stage=3),
    "zeroamp 3 live": partial(build, stage=3, zero={"stage3_max_live_parameters": EVERYTHING}),
    "zeroamp 3 prefetch": partial(build, stage=3, zero={"stage3_prefetch_bucket_size": PREFETCHED}),
    "zeroamp 3 native": partial(build, stage=3, own={"reduce_accumulate_dtype": "native"}),
}

VARIANTS = {
    "zeroamp 2 sizes of DeepSpeed": partial(build, stage=2, zero=SIZES),
    "zeroamp 3 sizes of DeepSpeed": partial(build, stage=3, zero=SIZES),
    "zeroamp 2 reproducible": partial(build, stage=2, own={"reproducible": True}),
    "zeroamp 3 reproducible": partial(build, stage=3, own={"reproducible": True}),
    "zeroamp 3 hpZ": partial(build, stage=3, zero={"zero_hpz_partition_size": 2}),  # needs more than two ranks
}
"""Variants that set one key, to measure its effect. By name only (`--engines`)."""
