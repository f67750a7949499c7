"""Gradients that are partial on the tensor axis: their sums have the dtypes of the policy."""

from dataclasses import dataclass, field

import pytest
import torch

import zeroamp
from tests.models import parallel
from tests.oracles import partial_gradients
from tests.processes.parallel_training import data_rank, mesh_of
from tests.processes.training import config, full_parameters, same_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, kw_only=True)
class Case:
    """A config, a mesh, and what the oracle needs to know of them."""

    axes: tuple[int, int] = (2, 2)
    config: dict
    oracle: dict = field(default_factory=dict)


def _low(name, **more):
    return config(dtype=None, **{name: {"enabled": True} | more.pop("block", {})}, **more)


_NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}
_SCALED = {"initial_scale_power": 16, "hysteresis": 1}

CASES = {
    "autocast": Case(axes=(1, 4), config=config(), oracle={"autocast": BF16}),
    "autocast, fp32": Case(config=config(comm="fp32"), oracle={"autocast": BF16, "sent_as": FP32}),
    "bf16": Case(axes=(1, 4), config=_low("bf16"), oracle={"low": BF16}),
    "bf16, fp32": Case(config=_low("bf16", comm="fp32"), oracle={"low": BF16, "sent_as": FP32}),
    "bf16, native": Case(config=_low("bf16", **_NATIVE), oracle={"low": BF16, "native": True}),
    "bf16, native, fp32": Case(
        config=_low("bf16", comm="fp32", **_NATIVE), oracle={"low": BF16, "sent_as": FP32, "native": True}
    ),
    "fp16": Case(axes=(1, 4), config=_low("fp16", block=_SCALED), oracle={"low": FP16, "scale": 2.0**16}),
    "autocast fp16": Case(
        axes=(1, 4), config=config(dtype="float16", fp16=_SCALED), oracle={"autocast": FP16, "scale": 2.0**16}
    ),
    "bf16, accumulation": Case(
        config=_low("bf16", comm="fp32", accumulation=2), oracle={"low": BF16, "sent_as": FP32, "accumulation": 2}
    ),
}


def _train(sizes, cfg, num_steps):
    mesh = mesh_of(dp=sizes[0], tp=sizes[1])
    policy = zeroamp.policy_from_config(cfg, world_size=sizes[0])
    model = zeroamp.wrap_model(parallel.on_own_tokens(parallel.token_layers(), mesh["tp"]), policy, mesh)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    reports = []
    for index in range(num_steps * policy.gradient_accumulation_steps):
        tokens = parallel.tokens_of(index * sizes[0] + data_rank(mesh), mesh["tp"].get_local_rank(), sizes[1])
        train.backward(model(tokens))
        reports.append(train.step())
    reports = [report for report in reports if report is not None]
    return [r.grad_norm for r in reports], [r.skipped for r in reports], full_parameters(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_it_has_the_bits_of_all_ranks_in_one_process(ranks4, name, stage):
    case = CASES[name]
    cfg = {**case.config, "zero_optimization": {"stage": stage}}
    num_data, num_tensor = case.axes
    norms, skipped, parameters = partial_gradients.train(
        parallel.token_layers(), parallel.tokens_of, 3, num_data=num_data, num_tensor=num_tensor,
        reduce_each=stage > 1, **case.oracle,
    )  # fmt: skip
    for run in ranks4.run(_train, case.axes, cfg, 3):
        print(name, stage, run[0], norms, run[1], skipped)
        assert run[0] == norms
        assert run[1] == skipped
        assert same_bits(run[2], parameters) == []
