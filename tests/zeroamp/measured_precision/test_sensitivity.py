"""`zeroamp.sensitivity`: its numbers beside plain torch, a planted fault, and the recommended block."""

import contextlib
import json
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models import switchable
from tests.oracles import sensitivity as oracle
from tests.processes.training import config, full_parameters
from tests.selection import SUMS_ARE_IN_FP32
from zeroamp.measured_precision.groups import find_groups
from zeroamp.wrapping.state import wrap_state

FP16 = {"dtype": "float16", "fp16": {"initial_scale_power": 10}}
CASES = [
    *(({"stage": stage}, switchable.SixModules) for stage in (0, 3)),
    ({"stage": 3, **FP16}, switchable.SixModules),
    ({"stage": 3, "zeroamp": {"dp_replicate_size": 2}}, switchable.WithScale),
]


@dataclass(frozen=True, kw_only=True)
class Measured:
    rows: dict
    noise: float
    config_change: float
    low_change: float
    recommended: dict
    recommended_change: float | None
    advice: str
    text: str
    json: dict


def _wrapped(cls, options, **more):
    model = switchable.build(cls)
    return zeroamp.wrap_model(model, {**config(**options), **more}, auto_wrap_policy={"Linear"})


def _measured(cls, options, batch, arguments, more):
    found = zeroamp.sensitivity(_wrapped(cls, options, **more), [batch(dist.get_rank())], **arguments)
    return Measured(
        rows={row["group"]: row for row in found.rows},
        noise=found.noise,
        config_change=found.config_change,
        low_change=found.low_change,
        recommended=found.recommended,
        recommended_change=found.recommended_change,
        advice=found.advice,
        text=str(found),
        json=json.loads(found.to_json()),
    )


def measure(ranks, cls, options, *, more=None, **arguments):
    """Measure on each rank; the ranks found the same."""
    batch = switchable.tokens if issubclass(cls, switchable.SixModules) else switchable.vectors
    first, *others = ranks.run(_measured, cls, options, batch, arguments, more or {})
    assert all(each == first for each in others)
    return first


@pytest.mark.parametrize(("options", "cls"), CASES, ids=str)
def test_every_number_is_that_of_plain_torch(ranks2, options, cls):
    """Every change, the noise and the change of the whole are those of one process, at each stage.

    All groups in low precision compute what the config computes. Bytes are those that an all-gather saves; FLOPs are
    those of the products of a forward, times three.
    """
    found = measure(ranks2, cls, options)
    dtype, scale = (torch.float16, 2.0**10) if "fp16" in options else (torch.bfloat16, 1.0)
    model, of_ranks = switchable.build(cls), [switchable.tokens(rank) for rank in range(2)]
    rows, noise, low = oracle.measure(model, of_ranks, dtype, scale)
    keys = ("loss_change", "gradient_change", "own_gradient_change", "gradient_change_of_others")
    assert {name: tuple(row[key] for key in keys) for name, row in found.rows.items()} == {
        name: pytest.approx(numbers, rel=1e-6) for name, numbers in rows.items()
    }
    assert (found.noise, found.low_change) == pytest.approx((noise, low), rel=1e-6)
    assert low > 1e-4
    assert found.low_change == found.config_change
    width, num_tokens = switchable.WIDTH, 6 * 8
    products = {"query": 1, "up": 2, "down": 2, "lm_head": switchable.VOCAB / width}
    for name, row in found.rows.items():
        assert row["bytes_saved"] == 2 * width * width * products.get(name, 0)
        assert row["flops_saved"] == 3 * 2 * num_tokens * width * width * products.get(name, 0)


def _small_loss(model, batch):
    return model(batch) * 2.0**-18


def test_shares_that_fp16_loses_are_counted(ranks2):
    """At a scale of 2^24 most gradients overflow; those of a small loss at a scale of 2 become zero."""

    def shares(power, **arguments):
        options = {"stage": 3, "dtype": "float16", "fp16": {"initial_scale_power": power}}
        return measure(ranks2, switchable.SixModules, options, groups=["embed", "lm_head"], **arguments).rows

    large, small = shares(24), shares(1, loss_of=_small_loss)
    model, of_ranks = switchable.build(switchable.SixModules), [switchable.tokens(rank) for rank in range(2)]
    gradient = oracle.run(model, of_ranks, set()).gradient
    for group in ("embed", "lm_head"):
        own = gradient[f"{group}.weight"]
        assert large[group]["overflow"] == float((own * 2.0**24).half().isinf().double().mean())
        assert small[group]["underflow"] == float((((own * 2.0**-17).half() == 0) & (own != 0)).double().mean())
    assert large["lm_head"]["overflow"] > 0.5
    assert small["lm_head"]["underflow"] > 0


def test_a_planted_fault_is_found_and_recommended_alone(ranks2):
    found = measure(ranks2, switchable.Planted, {"stage": 3}, budget=0.05)
    assert next(iter(found.rows)) == "Difference"
    assert found.rows["Difference"]["gradient_change"] > 10 * found.rows["first"]["gradient_change"]
    assert found.recommended == {"zeroamp": {"overrides": [{"modules": ["Difference"], "compute": "fp32"}]}}
    assert found.recommended_change < 0.05 < found.low_change
    assert "Difference" in found.text
    assert found.json["recommended"] == found.recommended
    in_fp32 = [tuple(choice["in_fp32"]) for choice in found.json["choices"]]
    assert len(set(in_fp32)) == len(in_fp32)  # a choice that was measured is not run again
    again = measure(ranks2, switchable.Planted, {"stage": 3}, more=found.recommended, groups=["last"])
    assert again.config_change == found.recommended_change, "a model that is wrapped with the block computes this"


def test_a_recommendation_says_that_nothing_is_needed(ranks2):
    found = measure(ranks2, switchable.SixModules, {"stage": 2}, budget=0.5, groups=["up"])
    assert (found.recommended, found.recommended_change) == ({}, None)
    assert found.advice.startswith("Nothing is needed: the gradient changes by 0.00")


def test_a_recommendation_says_that_nothing_helps(ranks2):
    found = measure(ranks2, switchable.SixModules, {"stage": 2}, budget=1e-9, groups=["up"])
    assert (found.recommended, found.recommended_change) == ({}, None)
    assert found.advice.startswith("Nothing helps: with up in fp32 the gradient still changes by ")


def test_several_groups_are_recommended_if_one_is_not_enough(ranks2):
    """The block keeps what an earlier override sets, and a model that is wrapped with it has the measured change."""
    before = {"zeroamp": {"overrides": [{"modules": ["norm"], "communication": "bf16"}]}}
    found = measure(ranks2, switchable.SixModules, {"stage": 3}, more=before, budget=0.001)
    ours, *others = found.recommended["zeroamp"]["overrides"]
    assert len(ours["modules"]) > 1
    assert others == before["zeroamp"]["overrides"]
    assert found.recommended_change <= 0.001


def test_groups_are_roles_thirds_or_patterns():
    model = switchable.build(switchable.SixModules)
    plan = zeroamp.build_plan(model, config(), auto_wrap_policy={"Linear"})
    found = {asked: find_groups(model, plan, asked) for asked in ("class and role", "depth", ("up", "Linear"))}
    modules = {asked: {group.name: group.modules for group in groups} for asked, groups in found.items()}
    assert modules == {
        "class and role": {**{role: (module,) for module, role in oracle.MODULES.items()}, oracle.BETWEEN: ("",)},
        "depth": {
            "first third of the blocks": ("query", "up"),
            "middle third of the blocks": ("down",),
            "last third of the blocks": ("lm_head",),
            oracle.BETWEEN: ("", "embed", "norm"),
        },
        ("up", "Linear"): {
            "up": ("up",),
            "Linear": ("query", "down", "lm_head"),
            oracle.BETWEEN: ("", "embed", "norm"),
        },
    }


def test_a_vector_beside_linears_hides_no_role():
    """The module with the vector is a group of its own, which the config cannot name: its name has the Linears too."""
    model = switchable.build(switchable.Mixers)
    found = find_groups(model, zeroamp.build_plan(model, config()), "class and role")
    assert {group.name: (group.modules, group.patterns) for group in found} == {
        "mixer.inner": (("blocks.0.mixer.inner", "blocks.1.mixer.inner"), ["mixer.inner"]),
        "mixer.outer": (("blocks.0.mixer.outer", "blocks.1.mixer.outer"), ["mixer.outer"]),
        "Mixer": (("blocks.0.mixer", "blocks.1.mixer"), ()),
        oracle.BETWEEN: ((), ()),
    }
    assert [param.fqn for param in found[2].params] == ["blocks.0.mixer.decay", "blocks.1.mixer.decay"]


def _steps(options, calls):
    """Train a step after each of `calls`; return what training computed, and what the calls left."""
    model = zeroamp.wrap_model(switchable.build(switchable.Noisy), config(**options), auto_wrap_policy={"Sequential"})
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.blocks[2].eval()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(dist.get_rank())
    batch, reports, left = switchable.vectors(dist.get_rank(), 8), [], []
    for call in calls:
        before = _state(model)
        call(model, batch)
        left += [(call, name) for name, value in _state(model).items() if value != before[name]]
        report = None
        while report is None:
            train.backward(model(batch))
            report = train.step()
        reports.append((report.loss, report.grad_norm))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    numbers = (torch.rand(1), random.random(), float(np.random.random()))
    return (reports, full_parameters(model), buffers, numbers, dict(wrap_state(model).traffic.num_bytes)), left


def _state(model):
    state = wrap_state(model)
    modules = list(model.modules())
    return {
        "hooks": [(len(each._forward_pre_hooks), len(each._forward_hooks)) for each in modules],
        "forwards": [vars(each).get("forward") for each in modules],
        "training": [each.training for each in modules],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "traffic": (dict(state.traffic.calls), state.traffic.enabled),
        "step": str(state.step),
        "reductions": [(e.reduction.communication_dtype, e.reduction.reduce_dtype) for e in state.gradients],
    }


def _nothing(model, batch):
    """Train without a measurement, for comparison."""


def _measure(model, batch):
    zeroamp.sensitivity(model, [batch], budget=1e-6, groups=["Linear"])


MEMORY, BOTH = torch.OutOfMemoryError, (0, 1)
OUT_OF_MEMORY = "Tried to allocate 2.00 GiB. GPU 0 has 1.50 GiB free."
TEXTS = {
    ValueError: "ValueError: asked to raise",
    torch.OutOfMemoryError: "sensitivity: the forward and backward of a batch does not fit into memory: "
    f"{OUT_OF_MEMORY} Pass several smaller batches",
}
"""The error of a rank, in the error of all ranks."""


@dataclass(frozen=True)
class Fails:
    """A measurement of which one run fails on some ranks: in the loss, or in the forward or backward of a block."""

    run: int
    """1: as the config has it. 2: in fp32. 3 and 4: of half the batch. 5 and later: in low precision."""
    place: str
    error: type[Exception]
    ranks: tuple[int, ...] = (1,)

    def __call__(self, model, batch):
        num, handles = 0, []

        def fail(*_):
            raise self.error(OUT_OF_MEMORY if self.error is MEMORY else "asked to raise")

        def loss_of(model, batch):
            nonlocal num
            num += 1
            if num == self.run and dist.get_rank() in self.ranks:
                block = model.blocks[1][0]
                if self.place == "loss":
                    fail()
                add = block.register_forward_hook if self.place == "forward" else block.register_full_backward_hook
                handles.append(add(fail))
            try:
                return model(batch)
            except self.error:
                raise
            except Exception as error:  # that another rank has failed
                with contextlib.suppress(Exception):
                    model(batch)  # a loop that tries again meets the error again
                raise RuntimeError("replaced by the loop") from error

        expected = (zeroamp.StepError, f"sensitivity failed on rank 1: {TEXTS[self.error]}")
        if self.ranks == BOTH:
            expected = (ValueError, "asked to raise")
        with pytest.raises(expected[0]) as caught:
            zeroamp.sensitivity(model, [batch], loss_of)
        for handle in handles:
            handle.remove()
        assert str(caught.value).startswith(expected[1])
        assert num == self.run


def _compared(options, calls):
    plain, _ = _steps(options, [_nothing] * len(calls))
    found, left = _steps(options, calls)
    return left, _is_equal(plain, found)


def _is_equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return a == b


LEAVES = [
    ({"stage": 0}, [_measure, Fails(4, "loss", ValueError, BOTH), Fails(6, "backward", ValueError)]),
    # From torch 2.15 on, a step of one micro-batch cannot be measured there: StepError.
    *[({"stage": 1, "accumulation": 2, "data_types": {"grad_accum_dtype": "bf16"}}, [_measure])][SUMS_ARE_IN_FP32:],
    ({"stage": 2, "accumulation": 2}, [_measure, Fails(2, "backward", MEMORY), Fails(1, "loss", ValueError)]),
    ({"stage": 3}, [Fails(1, "backward", MEMORY), _measure, Fails(2, "forward", MEMORY), Fails(7, "loss", ValueError)]),
    ({"stage": 3}, [Fails(4, "backward", ValueError, BOTH), Fails(6, "forward", MEMORY)]),
    ({"stage": 3, **FP16}, [_measure, Fails(5, "loss", ValueError, BOTH)]),
]


@pytest.mark.parametrize(("options", "calls"), LEAVES, ids=[f"{i}, {case[0]}" for i, case in enumerate(LEAVES)])
def test_nothing_is_left_behind(ranks2, options, calls):
    """Steps have the same bits with a call before each, also with one that raises: one error on all ranks."""
    assert ranks2.run(_compared, options, calls) == [([], True)] * 2


def _refusal(case):
    modes = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}}}
    options = {"dtype": None, **modes[case]} if case in modes else {"stage": 2}
    model, batch = switchable.build(switchable.SixModules), switchable.tokens(dist.get_rank())
    arguments = {"batches": [batch], "groups": "class and role"}
    if case != "not wrapped":
        model = _wrapped(switchable.SixModules, options)
    if case == "low weights":
        model = switchable.build(switchable.SixModules)
        model.up.requires_grad_(False).bfloat16()
        model = zeroamp.wrap_model(model, config(2), auto_wrap_policy={"Linear"})
    if case == "open step":
        zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0)).backward(model(batch))
    elif case == "after a backward":
        model(batch).backward()
    elif case == "after a forward":
        model(batch)
    elif case == "asleep":
        zeroamp.sleep(model, [])
    arguments |= {
        "no batch": {"batches": []},
        "no list": {"batches": batch},
        "one sample": {"batches": [batch[:1]]},
        "other shapes": {"batches": [batch[: 4 + dist.get_rank()]]},
        "no match": {"groups": ["nrm"]},
        "no groups": {"groups": "roles"},
        "budget": {"budget": 0},
        "not finite": {"loss_of": lambda model, batch: model(batch) * float("inf" if dist.get_rank() else 1)},
    }.get(case, {})
    with pytest.raises(zeroamp.ZeroAmpError) as caught:
        zeroamp.sensitivity(model, **arguments)
    return type(caught.value).__name__, str(caught.value)


REFUSED = {
    "not wrapped": ("WrapError", "is not wrapped. Call zeroamp.wrap_model first"),
    "asleep": ("WrapError", "is asleep"),
    "open step": ("StepError", "must be called between two optimizer steps, but embed.weight has a gradient"),
    "after a backward": ("StepError", "but embed.weight has a gradient. Call it before training, or after a step once"),
    "after a forward": ("StepError", "must be called between two optimizer steps, but embed.weight is unsharded"),
    "no batch": ("StepError", "must be a list of batches, but is an empty list"),
    "no list": ("StepError", "must be a list of batches, but is a Tensor. Pass [batch]"),
    "one sample": ("StepError", "got one batch of 1 sample(s). Pass two batches"),
    "other shapes": ("StepError", "the shapes of batch 0 is [(4, 8)] on rank 0, but [(5, 8)] on rank 1"),
    "fp32": ("ConfigError", "the config sets fp32 precision. For the measurement, wrap the model with"),
    "bf16": ("ConfigError", "the config sets bf16 precision. For the measurement, wrap the model with"),
    "fp16": ("ConfigError", "the config sets fp16 precision. For the measurement, wrap the model with"),
    "low weights": ("ConfigError", "cannot run up.weight in fp32, because it is frozen and stored in a low precision"),
    "no match": (
        "ConfigError",
        "'nrm' matches no module of SixModules below the root that no earlier pattern matches. Did you mean 'norm'?",
    ),
    "no groups": ("ConfigError", "must be 'class and role', 'depth' or a list of patterns, but is 'roles'"),
    "budget": ("ConfigError", "(budget=) must be a positive number, but is 0"),
    "not finite": ("StepError", "the loss in fp32 is not finite, so nothing can be compared with it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_measured_is_one_error_on_all_ranks(ranks2, case):
    (kind, words), (first, second) = REFUSED[case], ranks2.run(_refusal, case)
    assert first[0] == second[0] == kind
    assert words in first[1]
    assert first[1] == second[1]
