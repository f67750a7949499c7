"""Gradients that are partial on the tensor axis: their sums have the dtypes of the policy."""

from dataclasses import dataclass, field

import pytest
import torch

import zeroamp
from benchmarks.peers.counting import Collectives
from tests.models import parallel
from tests.oracles import partial_gradients
from tests.processes.parallel_training import data_rank, mesh_of, num_data
from tests.processes.training import config, full_parameters, same_bits
from tests.selection import slow_but

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, kw_only=True)
class Case:
    """A config, its stage, a mesh, and what the oracle needs to know of them.

    Two gradients in bf16 have the same sum in bf16 and in fp32, rounded to bf16. So sums in bf16 have four ranks.
    """

    stage: int = 3
    axes: dict = field(default_factory=lambda: {"dp": 2, "tp": 2})
    config: dict
    oracle: dict


def _low(name, block=None, **more):
    return config(dtype=None, **{name: {"enabled": True, **(block or {})}}, **more)


FOUR = {"dp": 1, "tp": 4}
REPLICAS = {"dp_replicate": 2, "dp_shard": 1, "tp": 2}
NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}
SCALED = {"initial_scale_power": 16, "hysteresis": 1}

CASES = {
    "autocast": Case(axes=FOUR, config=config(), oracle={"autocast": BF16}),
    "bf16": Case(stage=2, axes=FOUR, config=_low("bf16"), oracle={"low": BF16}),
    "bf16, sent in fp32": Case(config=_low("bf16", comm="fp32"), oracle={"low": BF16, "sent_as": FP32}),
    "bf16, native": Case(config=_low("bf16", **NATIVE), oracle={"low": BF16, "native": True}),
    "bf16, replicas, sent in fp32": Case(
        axes=REPLICAS, config=_low("bf16", comm="fp32"), oracle={"low": BF16, "sent_as": FP32}
    ),
    "bf16, accumulation": Case(
        stage=1, config=_low("bf16", accumulation=2), oracle={"low": BF16, "accumulation": 2, "sent_as": FP32}
    ),
    "fp16": Case(axes=FOUR, config=_low("fp16", SCALED), oracle={"low": FP16, "scale": 2.0**16}),
}


def _wrapped(axes, cfg):
    mesh = mesh_of(**axes)
    policy = zeroamp.policy_from_config(cfg, world_size=num_data(mesh))
    model = zeroamp.wrap_model(parallel.on_own_tokens(parallel.token_layers(), mesh["tp"]), policy, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return mesh, model, zeroamp.TrainStep(model, optimizer)


def _tokens(mesh, index):
    return parallel.tokens_of(index * num_data(mesh) + data_rank(mesh), mesh["tp"].get_local_rank(), mesh["tp"].size())


def _train(axes, cfg, num_steps):
    mesh, model, train = _wrapped(axes, cfg)
    reports = []
    for index in range(num_steps * cfg["gradient_accumulation_steps"]):
        train.backward(model(_tokens(mesh, index)))
        reports.append(train.step())
    reports = [report for report in reports if report is not None]
    return [r.grad_norm for r in reports], [r.skipped for r in reports], full_parameters(model)


@pytest.mark.parametrize("name", slow_but(CASES, "autocast", "bf16", "bf16, sent in fp32", "fp16"))
def test_it_has_the_bits_of_all_ranks_in_one_process(ranks4, name):
    case = CASES[name]
    cfg = {**case.config, "zero_optimization": {"stage": case.stage}}
    sizes = {"num_data": 4 // case.axes["tp"], "num_tensor": case.axes["tp"], "reduce_each": case.stage > 1}
    norms, skipped, parameters = partial_gradients.train(
        parallel.token_layers(), parallel.tokens_of, 3, **sizes, **case.oracle
    )
    assert skipped == [case.oracle.get("scale", 1.0) > 1, False, False]
    for found in ranks4.run(_train, case.axes, cfg, 3):
        assert found[:2] == (norms, skipped)
        assert same_bits(found[2], parameters) == []


def _collectives(cfg):
    """What is communicated over the tensor axis in a backward. With one data rank, this is all."""
    mesh, model, train = _wrapped(FOUR, cfg)
    loss = model(_tokens(mesh, 0))
    zeroamp.traffic(model).reset()
    with Collectives() as seen:
        train.backward(loss)
    assert not zeroamp.traffic(model).calls
    numel = sum(parameter.numel() for fqn, parameter in model.named_parameters() if fqn != "scale")
    return seen.calls, numel, seen.num_bytes


@pytest.mark.parametrize(
    ("more", "dtype", "kinds"),
    [
        ({}, BF16, {"all_to_all", "all_gather"}),
        ({"communication_data_type": "fp32"}, FP32, {"all_to_all", "all_gather"}),
        (NATIVE, BF16, {"all_reduce"}),
    ],
    ids=["bf16", "fp32", "native"],
)
def test_a_group_has_one_sum_in_the_communication_dtype(ranks4, more, dtype, kinds):
    calls, numel, num_bytes = ranks4.run(_collectives, _low("bf16", **more))[0]
    assert calls == {(kind, dtype): 3 for kind in kinds}  # two blocks and the root
    assert all(numel <= size // dtype.itemsize < numel + 3 * 4 for size in num_bytes.values())  # padded to the ranks
