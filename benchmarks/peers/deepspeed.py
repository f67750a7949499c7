"""DeepSpeed with `torch_autocast` in bf16 at stages 1, 2 and 3, where it is installed. Measured with 0.19.8."""

import importlib.util
import logging
import os
import warnings
from functools import partial
from typing import Any

import torch

from benchmarks.peers.engine import Engine, Setup, UnavailableError, mean

NOTHING_LIVE = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}

SMALL_BUCKETS = NOTHING_LIVE | {"reduce_bucket_size": 2**18}
"""For models smaller than the default bucket of 5e8 elements: the largest weight of the 3.7m model."""


def build(setup: Setup, *, stage: int, zero: dict[str, int] | None = None) -> Engine:
    """Make an engine of a model. `zero` adds to the block "zero_optimization".

    Raises:
        UnavailableError: DeepSpeed is not installed, or the process group is a fake one, which it cannot use.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise UnavailableError("not installed")
    if setup.options.fake:
        raise UnavailableError("not with a fake process group")
    os.environ.setdefault("DS_ACCELERATOR", setup.device.type)
    import deepspeed  # here, since its import looks for an accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)  # it calls older names
    model = setup.model()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=setup.optimizer(model), config=_config(setup, stage, zero or {})
    )

    def step() -> torch.Tensor:
        losses = []
        for tokens in setup.micro_batches:
            losses.append(engine(tokens))
            engine.backward(losses[-1])
            engine.step()
        return mean(losses)

    return Engine(step=step)


def _config(setup: Setup, stage: int, zero: dict[str, int]) -> dict[str, Any]:
    options = setup.options
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.micro_batches,
        "gradient_clipping": options.clip,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


ENGINES = {
    "DeepSpeed 1": partial(build, stage=1),
    "DeepSpeed 2": partial(build, stage=2),
    "DeepSpeed 3": partial(build, stage=3),
    "DeepSpeed 3 nothing live": partial(build, stage=3, zero=NOTHING_LIVE),
    "DeepSpeed 3 small": partial(build, stage=3, zero=SMALL_BUCKETS),
}
