"""Ranges are in the trace under their names, nest, are closed when something raises, and change no bit."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zeroamp
from tests.measuring.traces import crossing, end, is_inside, names, ours, recorded
from tests.models.prepared import checkpoint_outside, compile_blocks
from tests.models.small import batch, loss_of
from tests.processes.training import check_same_run, config, train, wrapped
from tests.selection import slow_but
from zeroamp.hooks.observers.ranges import Ranges, UnitRanges
from zeroamp.reporting.chrome_trace import nest_backwards

NAME = "llama_tied"
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


class Chain(nn.Module):
    """Units inside a unit: `inner` returns what its last layer returns. A layer raises what it is given."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Layer(), Layer())
        self.last = Layer()

    def forward(self, x):
        return self.last(self.inner(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.raises = None

    def forward(self, x):
        if self.raises is not None:
            raise self.raises
        return self.linear(x)


UNITS = ("", "inner", "inner.0", "inner.1", "last")


def _chain(mode="profiler", units=UNITS):
    torch.manual_seed(0)
    model = Chain()
    ranges = Ranges(mode)
    for fqn in units:
        UnitRanges(ranges, fqn).attach(model.get_submodule(fqn))
    return model, ranges


def _step(model, ranges, x=None):
    loss = model(torch.ones(2, 4, requires_grad=True) if x is None else x).sum()
    with ranges.inside("backward"):
        loss.backward()


def test_units_inside_units_nest_forward_and_backward():
    events = recorded(_step, *_chain())
    nest_backwards(events)
    assert names(events) == [
        *("forward (root)", "forward (inner)", "forward (inner.0)", "forward (inner.1)", "forward (last)"),
        *("backward (root)", "backward (last)", "backward (inner)", "backward (inner.1)", "backward (inner.0)"),
    ]
    assert crossing(events) == []
    by_name = {event["name"]: event for event in ours(events)}
    for outer, inner in (("root", "inner"), ("root", "last"), ("inner", "inner.0"), ("inner", "inner.1")):
        assert is_inside(by_name[f"forward ({inner})"], by_name[f"forward ({outer})"])
        assert is_inside(by_name[f"backward ({inner})"], by_name[f"backward ({outer})"])


def test_every_node_of_a_units_backward_is_inside_its_range():
    events = recorded(_step, *_chain(units=("", "last")))
    nest_backwards(events)
    (unit,) = [event for event in ours(events) if event["name"] == "backward (last)"]
    nodes = [event for event in events if event["name"].endswith("evaluate_function: AddmmBackward0")]
    assert [is_inside(node, unit) for node in sorted(nodes, key=lambda node: node["ts"])] == [True, False, False]


def test_a_unit_whose_inputs_need_no_gradient_is_closed_at_the_end_of_the_backward():
    model, ranges = _chain(units=("", "inner.0", "inner.1"))

    def steps():
        for _ in range(2):  # without a range around the backward, as in a loop without TrainStep
            model(torch.ones(2, 4)).sum().backward()
            with ranges.inside("clip"):
                pass

    events = recorded(steps)
    nest_backwards(events)
    assert crossing(events) == []
    backwards = [event for event in ours(events) if event["name"] == "backward (inner.0)"]
    clips = [event for event in ours(events) if event["name"] == "clip"]
    assert len(backwards) == len(clips) == 2
    assert all(end(backward) < clip["ts"] for backward, clip in zip(backwards, clips, strict=True))


@pytest.mark.parametrize("error", [ValueError("asked to"), KeyboardInterrupt()], ids=["Exception", "BaseException"])
def test_what_a_forward_that_raises_left_open_is_closed_before_the_next(error):
    model, ranges = _chain()

    def body():
        model.inner[1].raises = error
        with pytest.raises(type(error)):
            _step(model, ranges)
        model.inner[1].raises = None
        _step(model, ranges)

    events = recorded(body)
    nest_backwards(events)
    assert crossing(events) == []
    second = names(recorded(_step, *_chain()))
    assert names(events)[-len(second) :] == second
    first, other = (event for event in ours(events) if event["name"] == "forward (inner.1)")
    assert end(first) < other["ts"]


def test_a_forward_that_raises_is_closed_at_once():
    model, ranges = _chain()
    model.inner[1].raises = ValueError("asked to")

    def body():
        with pytest.raises(ValueError, match="asked to"):
            _step(model, ranges)
        with ranges.inside("clip"):
            pass

    *forwards, clip = ours(recorded(body))
    assert [forward["name"] for forward in forwards] == [f"forward ({fqn or 'root'})" for fqn in UNITS[:-1]]
    assert all(end(forward) <= clip["ts"] for forward in forwards)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("asked to")


def test_what_a_backward_that_raises_left_open_is_closed_with_the_range_around_it():
    model, ranges = _chain()

    def body():
        x = RaisesInBackward.apply(torch.ones(2, 4, requires_grad=True))
        handle = model.inner[0].register_forward_hook(lambda _module, _args, output: RaisesInBackward.apply(output))
        with pytest.raises(ValueError, match="asked to"):
            _step(model, ranges, x)
        handle.remove()
        with ranges.inside("clip"):
            _step(model, ranges)

    events = recorded(body)
    nest_backwards(events)
    assert crossing(events) == []
    assert names(events).count("backward (inner.1)") == 2


def test_a_range_is_closed_when_its_body_raises_and_what_is_inside_with_it():
    ranges = Ranges("profiler")

    def body():
        with pytest.raises(ValueError, match="asked to"):
            _open_and_raise(ranges)
        with ranges.inside("clip"):
            pass

    norm, cast, clip = ours(recorded(body))
    assert (norm["name"], cast["name"], clip["name"]) == ("norm", "cast (never closed)", "clip")
    assert is_inside(cast, norm)
    assert end(norm) <= clip["ts"]


def _open_and_raise(ranges):
    with ranges.inside("norm"):
        ranges.open("cast", "never closed")
        raise ValueError("asked to")


def test_without_a_profiler_nothing_is_opened_and_no_tensor_is_hooked():
    model, ranges = _chain()
    output = model(torch.ones(2, 4))
    assert output._backward_hooks is None
    assert ranges.open("norm") is None
    events = recorded(_step, *_chain(mode="off"))
    assert names(events) == []


def test_nvtx_ranges_are_pushed_and_popped_in_pairs_and_a_profiler_sees_them_too(monkeypatch):
    pushed, depths = [], [0]

    def push(name):
        pushed.append(name)
        depths.append(depths[-1] + 1)

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: depths.append(depths[-1] - 1))
    _step(*_chain(mode="nvtx"))
    assert (min(depths), max(depths), depths[-1]) == (0, 3, 0)
    assert sorted(pushed) == sorted(f"zeroamp::{name}" for name in names(recorded(_step, *_chain())))
    assert names(recorded(_step, *_chain(mode="nvtx"))) == names(recorded(_step, *_chain()))


def test_nvtx_is_refused_where_there_is_none(ranks2):
    assert "zeroamp.ranges " in ranks2.run(_refused)[0]
    assert 'Write "profiler"' in ranks2.run(_refused)[0]


def _refused():
    with pytest.raises(zeroamp.ConfigError) as raised:
        wrapped(NAME, config(3, zeroamp={"ranges": "nvtx"}))
    return str(raised.value)


# With FSDP2


def _train_step(name, stage, how="eager", **more):
    model = wrapped(name, config(stage, clip=1.0, **more))
    HOW[how](model)
    return model, zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def _one_step(name, model, train_step):
    for index in range(model._zeroamp_state.plan.policy.gradient_accumulation_steps):
        train_step.backward(loss_of(model, batch(name, 2 * index + dist.get_rank())))
        train_step.step()


def _recorded_step(name, stage, how="eager", more=None):
    model, train_step = _train_step(name, stage, how, **(more or {}))
    _one_step(name, model, train_step)
    events = recorded(_one_step, name, model, train_step)
    nest_backwards(events)
    return events


HOW = {"eager": lambda model: None, "compiled": compile_blocks, "recomputed": checkpoint_outside}

STEP = {"forward (root)", "backward (root)", "norm", "clip", "optimizer (AdamW)"}
COMPUTE = {f"{kind} ({fqn})" for kind in ("forward", "backward") for fqn in BLOCKS}
GROUPS = {**dict.fromkeys(BLOCKS, "bf16"), "root": "fp32", "model-wide:fp32": "fp32"}
CASTS = {f"cast ({group} -> {dtype})" for group, dtype in GROUPS.items()}
CASTS_TO_FP32 = {f"cast ({group} -> fp32)" for group in GROUPS}
GATHERS = {f"all_gather ({group} {dtype})" for group, dtype in GROUPS.items()}
REDUCTIONS = {f"reduce_scatter ({group} {dtype}, sum fp32)" for group, dtype in GROUPS.items()}
SUMS = {f"sum ({group} -> fp32)" for group in GROUPS}
ALL_REDUCES = {f"all_reduce ({group} fp32)" for group in GROUPS}


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 3))
@pytest.mark.parametrize("how", slow_but(["eager", "compiled", "recomputed"], "eager", "recomputed"))
def test_each_range_is_there_with_its_fqn_and_all_events_nest(ranks2, stage, how):
    expected = STEP | COMPUTE | (GATHERS | CASTS | REDUCTIONS | SUMS if stage else CASTS_TO_FP32 | ALL_REDUCES)
    if how == "recomputed":
        expected |= {f"recompute ({fqn})" for fqn in BLOCKS}
    for events in ranks2.run(_recorded_step, NAME, stage, how):
        assert set(names(events)) == expected
        assert crossing(events) == []


def test_where_each_range_lies(ranks2):
    events = ranks2.run(_recorded_step, NAME, 3, "recomputed")[0]
    by_name = {}
    for event in ours(events):
        by_name.setdefault(event["name"], []).append(event)
    (root,), (root_backward,) = by_name["forward (root)"], by_name["backward (root)"]
    for fqn in BLOCKS:
        gather, gather_again = by_name[f"all_gather ({fqn} bf16)"]
        (forward,), (recompute,) = by_name[f"forward ({fqn})"], by_name[f"recompute ({fqn})"]
        (backward,), (cast,) = by_name[f"backward ({fqn})"], by_name[f"cast ({fqn} -> bf16)"]
        (reduction,), (total,) = by_name[f"reduce_scatter ({fqn} bf16, sum fp32)"], by_name[f"sum ({fqn} -> fp32)"]
        order = [gather, forward, gather_again, recompute, cast, reduction]
        assert all(end(one) <= other["ts"] for one, other in pairwise(order))
        assert is_inside(forward, root)
        assert is_inside(recompute, backward)
        assert is_inside(backward, root_backward)
        assert end(backward) <= cast["ts"]
        assert is_inside(total, reduction)
    (norm,), (clip,), (optimizer,) = by_name["norm"], by_name["clip"], by_name["optimizer (AdamW)"]
    assert end(root_backward) <= norm["ts"] < end(norm) <= clip["ts"] < end(clip) <= optimizer["ts"]


@pytest.mark.parametrize(
    ("name", "more", "units"),
    [
        ("conv", {}, ("stages.0", "stages.1")),  # the first unit's input needs no gradient
        (NAME, {"zero_optimization": {"stage": 3, "reduce_bucket_size": 10**9}}, BLOCKS),  # one merged unit
        (NAME, {"gradient_accumulation_steps": 2}, BLOCKS),
    ],
    ids=["no gradient of the input", "merged", "accumulation"],
)
def test_every_module_of_a_unit_has_one_backward_for_each_forward(ranks2, name, more, units):
    cfg = {"accumulation": more["gradient_accumulation_steps"]} if "gradient_accumulation_steps" in more else more
    events = ranks2.run(_recorded_step, name, 3, "eager", cfg)[0]
    assert crossing(events) == []
    found = names(events)
    for fqn in units:
        assert found.count(f"backward ({fqn})") == found.count(f"forward ({fqn})") == cfg.get("accumulation", 1)


def _train(stage, how, is_recorded):
    cfg = config(stage, clip=1.0, zeroamp={"ranges": "profiler" if is_recorded else "off"})
    if not is_recorded:
        return train(NAME, cfg, 2, prepare=HOW[how])
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        return train(NAME, cfg, 2, prepare=HOW[how])


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 3))
@pytest.mark.parametrize("how", slow_but(["eager", "compiled", "recomputed"], "eager"))
def test_training_has_the_same_bits_with_ranges_recorded_and_off(ranks2, stage, how):
    recorded_runs, plain_runs = ranks2.run(_train, stage, how, True), ranks2.run(_train, stage, how, False)
    for one, other in zip(recorded_runs, plain_runs, strict=True):
        check_same_run(one, other)
