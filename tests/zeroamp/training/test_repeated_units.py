"""Units that run several times before a backward: each is reduced once, with the bits of one process."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zeroamp
from tests.models.small import batch, build
from tests.oracles import one_process
from tests.processes.training import check_run, config, full_parameters, same_bits, train
from tests.selection import slow_but
from zeroamp.hooks.collectives.traffic import listening
from zeroamp.wrapping.state import wrap_state

NAME = "recurrent"
NUM_STEPS = 3


def _at_all_stages(stages, accumulation, comm):
    return {stage: train(NAME, config(stage, accumulation=accumulation, comm=comm), NUM_STEPS) for stage in stages}


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_unit_that_runs_six_times_has_the_bits_of_one_process(ranks2, accumulation):
    expected = {
        each: one_process.train(NAME, world_size=2, num_steps=NUM_STEPS, accumulation=accumulation, reduce_each=each)
        for each in (False, True)
    }
    for rank, by_stage in enumerate(ranks2.run(_at_all_stages, (0, 1, 2, 3), accumulation, "fp32")):
        for stage, run in by_stage.items():
            check_run(run, rank, expected[stage >= 2])


class _Reductions:
    """Counts the reductions of each group."""

    def __init__(self):
        self.calls = Counter()

    def on_collective(self, issued):
        if issued.collective != "all_gather":
            self.calls[issued.group_name] += 1


def _reductions(stage, num_forwards, num_backwards):
    """Return the reductions of each group, and the parameters after several forwards and one or several backwards."""
    model = zeroamp.wrap_model(build(NAME), zeroamp.policy_from_config(config(stage, comm="fp32")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted = _Reductions()
    with listening(wrap_state(model).listeners, counted):
        losses = [model(batch(NAME, index * 2 + dist.get_rank())) for index in range(num_forwards)]
        if num_backwards == 1:
            sum(losses[:2]).backward()  # the loss does not depend on a third forward
        else:
            for loss in losses[::-1]:
                loss.backward()
    optimizer.step()
    return counted.calls, full_parameters(model)


def _expected(num_forwards):
    model = build(NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for rank in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = [model(batch(NAME, index * 2 + rank)) for index in range(num_forwards)]
            sum(losses[:2]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
        parameter.grad = (one + other) / 2
    optimizer.step()
    return {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}


@pytest.mark.parametrize("num_forwards", [1, 2, 4])
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_each_group_is_reduced_once_in_a_backward_of_several_forwards(ranks2, stage, num_forwards):
    expected = _expected(num_forwards)
    for calls, parameters in ranks2.run(_reductions, stage, num_forwards, 1):
        assert set(calls.values()) == {1}, calls
        if num_forwards == 1:
            assert same_bits(parameters, expected) == []


@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_each_of_several_backwards_reduces_each_group(ranks2, stage):
    for calls, _ in ranks2.run(_reductions, stage, 2, 2):
        assert set(calls.values()) == {2}, calls


def _of_fsdp2(name, order):
    """FSDP2 alone, all in bf16, with reductions in fp32."""
    model, policy = build(name), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return _train_plainly(model, name, order)


def _trained(cfg, name, order):
    return _train_plainly(zeroamp.wrap_model(build(name), zeroamp.policy_from_config(cfg)), name, order)


def _train_plainly(model, name, order):
    """The losses and parameters of a plain loop of 3 micro-batches. `order`: of their forwards and backwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(NUM_STEPS):
        losses = {}
        for kind, micro in order:
            if kind == "F":
                losses[micro] = model(batch(name, (step * 3 + micro) * 2 + dist.get_rank()))
            else:
                losses[micro].backward()
        found.append([float(losses[micro].detach()) for micro in range(3)])
        optimizer.step()
        optimizer.zero_grad()
    return found, full_parameters(model)


ONE_BY_ONE = [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 2)]
ALL_FORWARDS_FIRST = [("F", 0), ("F", 1), ("F", 2), ("B", 0), ("B", 1), ("B", 2)]
ONE_FORWARD_ONE_BACKWARD = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
LOW = {"dtype": None, "bf16": {"enabled": True}}


@pytest.mark.parametrize("name", slow_but(["llama_tied", NAME], "llama_tied"))
@pytest.mark.parametrize("options", [{}, LOW], ids=["autocast", "bf16"])
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_forwards_may_run_before_the_backwards_of_earlier_micro_batches(ranks2, stage, options, name):
    cfg = config(stage, **options)
    expected = ranks2.run(_trained, cfg, name, ONE_BY_ONE)
    for order in (ALL_FORWARDS_FIRST, ONE_FORWARD_ONE_BACKWARD):
        for (losses, parameters), (own_losses, own) in zip(
            expected, ranks2.run(_trained, cfg, name, order), strict=True
        ):
            assert own_losses == losses
            assert same_bits(own, parameters) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_has_the_bits_of_fsdp2_with_reductions_in_fp32(ranks2, stage):
    # FSDP2's reductions in bf16 round each sum over ranks. zeroamp sends bf16 and sums in fp32.
    theirs = ranks2.run(_of_fsdp2, "llama_tied", ALL_FORWARDS_FIRST)
    for (losses, parameters), (own_losses, own) in zip(
        theirs, ranks2.run(_trained, config(stage, **LOW), "llama_tied", ALL_FORWARDS_FIRST), strict=True
    ):
        assert own_losses == losses
        assert same_bits(own, parameters) == []
