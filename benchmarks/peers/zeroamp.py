"""zeroamp: bf16 autocast at stages 1, 2 and 3."""

from functools import partial
from typing import Any

import torch

import zeroamp
from benchmarks.peers.engine import Engine, Setup, mean

EVERYTHING = 10**12  # elements: more than any model here has
PREFETCHED = 50_000_000  # elements: DeepSpeed's default


def build(setup: Setup, *, stage: int, zero: dict[str, Any] | None = None, own: dict[str, Any] | None = None) -> Engine:
    """Wrap a model. `zero` and `own` add to the blocks "zero_optimization" and "zeroamp"."""
    options = setup.options
    policy = zeroamp.policy_from_config(
        {
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "zero_optimization": {"stage": stage, **(zero or {})},
            "gradient_accumulation_steps": options.micro_batches,
            "gradient_clipping": options.clip,
            "zeroamp": own or {},
        }
    )
    model = zeroamp.wrap_model(setup.model(), policy)
    train = zeroamp.TrainStep(model, setup.optimizer(model))

    def step() -> torch.Tensor:
        losses = []
        for tokens in setup.micro_batches:
            losses.append(model(tokens))
            train.backward(losses[-1])
            train.step()
        return mean(losses)

    return Engine(step=step, own_count=lambda: zeroamp.traffic(model).by_dtype())


ENGINES = {
    "zeroamp 1": partial(build, stage=1),
    "zeroamp 2": partial(build, stage=2),
    "zeroamp 3": partial(build, stage=3),
    "zeroamp 3 live": partial(build, stage=3, zero={"stage3_max_live_parameters": EVERYTHING}),
    "zeroamp 3 prefetch": partial(build, stage=3, zero={"stage3_prefetch_bucket_size": PREFETCHED}),
    "zeroamp 3 native": partial(build, stage=3, own={"reduce_accumulate_dtype": "native"}),
}
