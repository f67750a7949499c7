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


def _reductions(num_forwards, num_backwards):
    """The numbers of reductions of groups at each stage, in one or several backwards after several forwards."""
    found = {}
    for stage in range(4):
        model = zeroamp.wrap_model(build(NAME), zeroamp.policy_from_config(config(stage, comm="fp32")))
        counted = _Reductions()
        with listening(wrap_state(model).listeners, counted):
            losses = [model(batch(NAME, index * 2 + dist.get_rank())) for index in range(num_forwards)]
            if num_backwards == 1:
                sum(losses[:2]).backward()  # the loss does not depend on later forwards
            else:
                for loss in losses[::-1]:
                    loss.backward()
        found[stage] = set(counted.calls.values())
    return found


def test_each_group_is_reduced_once_in_a_backward_of_several_forwards(ranks2):
    assert ranks2.run(_reductions, 4, 1) == [{stage: {1} for stage in range(4)}] * 2


def test_each_of_several_backwards_reduces_each_group(ranks2):
    assert ranks2.run(_reductions, 2, 2) == [{stage: {2} for stage in range(4)}] * 2


def _of_fsdp2(order):
    """FSDP2 alone, all in bf16, with reductions in fp32."""
    model, mixed = build("llama_tied"), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=mixed)
    fully_shard(model, mp_policy=mixed)
    return _train_plainly(model, order)


def _trained(cfg, order):
    return _train_plainly(zeroamp.wrap_model(build("llama_tied"), zeroamp.policy_from_config(cfg)), order)


def _train_plainly(model, order):
    """The losses and parameters of a plain loop of 3 micro-batches. `order`: of their forwards and backwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(NUM_STEPS):
        losses = {}
        for kind, micro in order:
            if kind == "F":
                losses[micro] = model(batch("llama_tied", (step * 3 + micro) * 2 + dist.get_rank()))
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


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {}),
        pytest.param(1, LOW, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
        (3, {}),
        (3, LOW),
    ],
    ids=["stage 0", "stage 1, bf16", "stage 2", "stage 3", "stage 3, bf16"],
)
def test_forwards_may_run_before_the_backwards_of_earlier_micro_batches(ranks2, stage, options):
    cfg = config(stage, **options)
    expected = ranks2.run(_trained, cfg, ONE_BY_ONE)
    orders = {"all forwards first": ALL_FORWARDS_FIRST, "one forward, one backward": ONE_FORWARD_ONE_BACKWARD}
    runs = {name: ranks2.run(_trained, cfg, order) for name, order in orders.items()}
    if options == LOW and stage == 3:
        # FSDP2's reductions in bf16 round each sum over ranks. zeroamp sends bf16 and sums in fp32.
        runs["FSDP2 with reductions in fp32"] = ranks2.run(_of_fsdp2, ALL_FORWARDS_FIRST)
    for name, by_rank in runs.items():
        for (losses, parameters), (own_losses, own) in zip(expected, by_rank, strict=True):
            assert own_losses == losses, name
            assert same_bits(own, parameters) == [], name
