"""Labels are in the trace under their names, nest, and end when something raises."""

from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch

from tests.measuring.traces import crossing, end, is_inside, names, ours, recorded
from tests.models.prepared import checkpoint_outside
from tests.processes.training import SmallTraining, adamw, config
from zeroamp.hooks.observers.trace_labels import label, label_forwards
from zeroamp.wrapping.state import wrap_state

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def test_a_label_holds_the_dtype_and_costs_no_name_without_a_profiler():
    class Unnamed(str):
        def __format__(self, spec):
            raise AssertionError("expected no name")

    with label("all_gather", Unnamed("blocks.0"), torch.bfloat16):
        pass

    def body():
        with label("all_gather", "blocks.0", torch.bfloat16), label("norm"):
            pass

    assert names(recorded(body)) == ["all_gather (blocks.0 bf16)", "norm"]


# With FSDP2

HOW = {"eager": lambda model: None, "recomputed": checkpoint_outside}

STEP = {"backward", "norm", "clip", "optimizer (AdamW)"}
FORWARDS = {f"forward ({fqn})" for fqn in ("root", *BLOCKS)}
GROUPS = {**dict.fromkeys(BLOCKS, "bf16"), "root": "fp32", "model-wide:fp32": "fp32"}
GATHERS = {f"all_gather ({group} {dtype})" for group, dtype in GROUPS.items()}
REDUCTIONS = {f"reduce_scatter ({group} {dtype})" for group, dtype in GROUPS.items()}
ALL_REDUCES = {f"all_reduce ({group} fp32)" for group in GROUPS}


def _recorded_step(stage, how):
    training = SmallTraining(config(stage, clip=1.0), adamw, name="llama_tied")
    HOW[how](training.model)
    with ExitStack() as removed:
        for fqn, module in wrap_state(training.model).units.items():
            for handle in label_forwards(module, fqn):
                removed.callback(handle.remove)
        training.step()
        return recorded(training.step)


@pytest.mark.parametrize(("stage", "how"), [pytest.param(3, "recomputed", marks=pytest.mark.slow), (0, "eager")])
def test_each_label_is_there_with_its_fqn_and_all_events_nest(ranks2, stage, how):
    expected = STEP | FORWARDS | (GATHERS | REDUCTIONS if stage else ALL_REDUCES)
    if how == "recomputed":
        expected |= {f"recompute ({fqn})" for fqn in BLOCKS}
    for events in ranks2.run(_recorded_step, stage, how):
        assert set(names(events)) == expected
        assert crossing(events) == []


def test_where_each_label_lies(ranks2):
    events = ranks2.run(_recorded_step, 3, "recomputed")[0]
    by_name = {}
    for event in ours(events):
        by_name.setdefault(event["name"], []).append(event)
    (root,), (backward,) = by_name["forward (root)"], by_name["backward"]
    for fqn in BLOCKS:
        gather, gather_again = by_name[f"all_gather ({fqn} bf16)"]
        (forward,), (recompute,) = by_name[f"forward ({fqn})"], by_name[f"recompute ({fqn})"]
        (reduction,) = by_name[f"reduce_scatter ({fqn} bf16)"]
        order = [gather, forward, gather_again, recompute, reduction]
        assert all(end(one) <= other["ts"] for one, other in pairwise(order))
        assert is_inside(forward, root)
        assert is_inside(recompute, backward)
    (norm,), (clip,), (optimizer,) = by_name["norm"], by_name["clip"], by_name["optimizer (AdamW)"]
    assert end(backward) <= norm["ts"] < end(norm) <= clip["ts"] < end(clip) <= optimizer["ts"]
