"""`prefetch_bucket_size`: which gathers start when."""

import pytest
import torch
from torch import nn

import zeroamp
from benchmarks.peers.counting import Collectives
from tests.measuring.collectives import Gathers
from tests.processes.training import SmallTraining, config

BLOCK = 10_272 + 64  # elements of one of the three blocks: Linear layers and norms


def _reverse(model):
    """Run the blocks of a wrapped model in another order than they were registered in."""
    model.blocks._modules = dict(reversed(model.blocks._modules.items()))


def _log(size, prepare=None, threshold=0):
    """The gathers of one step, with the blocks' forwards and backwards between them."""
    training = SmallTraining(config(3, threshold=threshold), name="llama_tied", fields={"prefetch_bucket_size": size})
    if prepare is not None:
        prepare(training.model)
    with Gathers() as gathers, Collectives() as collectives:

        def watch(name, block):
            def after(_module, _args, output):
                output.register_hook(lambda _: gathers.log.append((f"back {name}", 0)))

            block.register_forward_pre_hook(lambda *_: gathers.log.append((f"run {name}", 0)))
            block.register_forward_hook(after)

        for name, block in training.model.blocks.named_children():
            watch(name, block)
        training.step()
    return [name.replace("blocks.", "b") for name, _ in gathers.log], sum(collectives.calls.values())


FORWARD = [f"b{i}{suffix}" for i in range(3) for suffix in ("", ":fp32")]
BACKWARD = FORWARD[::-1]


def test_each_unit_starts_the_gathers_of_those_after_it(ranks2):
    log, num_collectives = ranks2.run(_log, BLOCK)[0]
    forward = ["root", *FORWARD[:4], "run 0", *FORWARD[4:], "run 1", "run 2"]
    assert log == [*forward, *BACKWARD[:4], "back 2", *BACKWARD[4:], "back 1", "back 0"]
    log, _ = ranks2.run(_log, 2 * BLOCK)[0]
    assert log == ["root", *FORWARD, "run 0", "run 1", "run 2", *BACKWARD, "back 2", "back 1", "back 0"]
    log, num_without = ranks2.run(_log, 0)[0]
    assert ranks2.run(_log, BLOCK - 1)[0] == (log, num_without), "where no unit fits, it is left to FSDP2"
    assert log[:4] == ["root", "b0", "b0:fp32", "run 0"], "by default a forward gathers nothing ahead"
    assert num_collectives == num_without


def test_the_root_gathers_all_its_groups_before_it_starts_others(ranks2):
    log, _ = ranks2.run(_log, BLOCK, None, 100_000)[0]
    assert log[:5] == ["root", "model-wide:fp32", "b0", "b1", "run 0"]


def test_in_another_order_than_the_registered_one_some_units_are_gathered_again(ranks2):
    log, num_collectives = ranks2.run(_log, BLOCK, _reverse)[0]
    assert log == [
        *("root", "b0", "b0:fp32", "b2", "b2:fp32", "run 2"),
        *("b1", "b1:fp32", "b2", "b2:fp32", "run 1"),  # block 2 again: it is kept for the backward
        *("b1", "b1:fp32", "run 0"),
        *("b0:fp32", "b0", "back 0"),
        *("b0:fp32", "b0", "back 1"),  # for nothing
        *("b1:fp32", "b1", "back 2"),
    ]
    assert num_collectives == ranks2.run(_log, 0, _reverse)[0][1] + 2 * 2  # two units of two groups


def _gathers_of_a_backward(num_before, num_between):
    """The all-gathers of a backward, with evaluations before its forward, and between the forward and it."""
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    policy = zeroamp.policy_from_config(config(3, threshold=0))
    model = zeroamp.wrap_model(layers, policy, auto_wrap_policy=[nn.Linear])
    inputs = torch.ones(2, 8)

    def evaluate_times(count):
        with torch.no_grad():
            for _ in range(count):
                model(inputs)

    evaluate_times(num_before)
    loss = model(inputs).square().mean()
    evaluate_times(num_between)
    with Gathers() as gathers:
        loss.backward()
    return [name for name, _ in gathers.log]


@pytest.mark.parametrize(("num_before", "num_between"), [(0, 0), (2, 1)])
def test_a_backward_prefetches_what_it_needs_whatever_was_evaluated(ranks2, num_before, num_between):
    assert ranks2.run(_gathers_of_a_backward, num_before, num_between)[0] == ["2", "1", "0"]
