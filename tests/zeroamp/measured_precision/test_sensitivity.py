"""`zeroamp.sensitivity`: its numbers beside plain torch, a planted fault, and the recommended block."""

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
from zeroamp.measured_precision.groups import find_groups
from zeroamp.wrapping.state import wrap_state

FP16 = {"dtype": "float16", "fp16": {"initial_scale_power": 10}}
REPLICAS = {"zeroamp": {"dp_replicate_size": 2}}
CASES = [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, **FP16}]
ORACLES = [(options, switchable.SixModules) for options in CASES]


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


@pytest.mark.parametrize(("options", "cls"), [*ORACLES, ({"stage": 3, **REPLICAS}, switchable.WithScale)], ids=str)
def test_every_number_is_that_of_plain_torch(ranks2, options, cls):
    """Every change, the noise and the change of the whole are those of one process, at each stage."""
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


@pytest.mark.parametrize("options", CASES, ids=str)
def test_all_groups_low_compute_what_the_config_computes(ranks2, options):
    found = measure(ranks2, switchable.SixModules, options)
    assert found.low_change == found.config_change


def test_bytes_and_flops_are_those_of_the_low_modules(ranks2):
    """Bytes are those that an all-gather saves; FLOPs are those of the products of a forward, times three."""
    rows = measure(ranks2, switchable.SixModules, {"stage": 3}).rows
    width, num_tokens = switchable.WIDTH, 6 * 8
    assert {name: row["bytes_saved"] for name, row in rows.items()} == {
        "Embedding": 0,
        "LayerNorm": 0,
        "query": 2 * width * width,
        "up": 4 * width * width,
        "down": 4 * width * width,
        "lm_head": 2 * switchable.VOCAB * width,
        oracle.BETWEEN: 0,
    }
    products = {"query": 1, "up": 2, "down": 2, "lm_head": switchable.VOCAB / width}
    assert {name: row["flops_saved"] for name, row in rows.items()} == {
        name: 3 * 2 * num_tokens * width * width * products.get(name, 0) for name in rows
    }


def _small_loss(model, batch):
    return model(batch) * 2.0**-18


def test_shares_that_fp16_loses_are_counted(ranks2):
    """At a scale of 2^24 most gradients overflow; those of a small loss at a scale of 2 become zero."""
    options = {"stage": 3, "dtype": "float16"}
    large = measure(ranks2, switchable.SixModules, options | {"fp16": {"initial_scale_power": 24}}).rows
    fp16 = {"fp16": {"initial_scale_power": 1}}
    small = measure(ranks2, switchable.SixModules, options | fp16, loss_of=_small_loss).rows
    model, of_ranks = switchable.build(switchable.SixModules), [switchable.tokens(rank) for rank in range(2)]
    gradient = oracle.run(model, of_ranks, set()).gradient
    for module, group in oracle.MODULES.items():
        own = torch.cat([each.flatten() for name, each in gradient.items() if name.split(".")[0] == module])
        assert large[group]["overflow"] == float((own * 2.0**24).half().isinf().double().mean())
        assert small[group]["underflow"] == float((((own * 2.0**-17).half() == 0) & (own != 0)).double().mean())
    assert large["lm_head"]["overflow"] > 0.5
    assert small["lm_head"]["underflow"] > 0


@pytest.mark.parametrize("stage", [0, 3])
def test_a_planted_fault_is_found_and_recommended_alone(ranks2, stage):
    found = measure(ranks2, switchable.Planted, {"stage": stage}, budget=0.05)
    assert next(iter(found.rows)) == "Difference"
    assert found.rows["Difference"]["gradient_change"] > 10 * found.rows["first"]["gradient_change"]
    assert found.recommended == {"zeroamp": {"overrides": [{"modules": ["Difference"], "compute": "fp32"}]}}
    assert found.recommended_change < 0.05 < found.low_change
    assert "Difference" in found.text
    assert found.json["recommended"] == found.recommended
    again = measure(ranks2, switchable.Planted, {"stage": stage}, more=found.recommended)
    assert again.config_change == found.recommended_change, "a model that is wrapped with the block computes this"


def test_a_recommendation_says_that_nothing_is_needed(ranks2):
    found = measure(ranks2, switchable.SixModules, {"stage": 2}, budget=0.5)
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


def test_groups_are_roles_thirds_or_patterns(ranks2):
    thirds = measure(ranks2, switchable.SixModules, {"stage": 3}, groups="depth").rows
    assert {name: row["modules"] for name, row in thirds.items()} == {
        "first third of the blocks": ["query", "up"],
        "middle third of the blocks": ["down"],
        "last third of the blocks": ["lm_head"],
        oracle.BETWEEN: ["", "embed", "norm"],
    }
    patterns = measure(ranks2, switchable.SixModules, {"stage": 3}, groups=["up", "Linear"]).rows
    assert patterns["Linear"]["modules"] == ["query", "down", "lm_head"]
    assert patterns["up"]["modules"] == ["up"]


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
    """Train three steps, with `calls` before each; return what training computed, and what the calls left."""
    model = zeroamp.wrap_model(switchable.build(switchable.Noisy), config(**options), auto_wrap_policy={"Sequential"})
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.blocks[2].eval()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(dist.get_rank())
    batch, reports, left = switchable.vectors(dist.get_rank(), 8), [], []
    for _ in range(3):
        before = _state(model)
        if calls is not None:
            calls(model, batch)
            left += [name for name, value in _state(model).items() if value != before[name]]
        report = None
        while report is None:
            train.backward(model(batch))
            report = train.step()
        reports.append((report.loss, report.grad_norm))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    numbers = (torch.rand(1), random.random(), float(np.random.random()))
    return reports, full_parameters(model), buffers, numbers, dict(wrap_state(model).traffic.num_bytes), left


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


def _measure(model, batch):
    zeroamp.sensitivity(model, [batch], budget=1e-6)


OUT_OF_MEMORY = "Tried to allocate 2.00 GiB. GPU 0 has 1.50 GiB free."


def _out_of_memory(module, _args, _out):
    raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def _out_of_memory_on_one_rank(model, batch, *, is_in_forward):
    """The second run, that in fp32, needs too much memory on rank 1, in the middle block."""
    num, handles = 0, []

    def loss_of(model, batch):
        nonlocal num
        num += 1
        if num == 2 and dist.get_rank() == 1 and is_in_forward:
            handles.append(model.blocks[1][0].register_forward_hook(_out_of_memory))
        if num == 2 and dist.get_rank() == 1 and not is_in_forward:
            handles.append(model.blocks[1][0].register_full_backward_hook(_out_of_memory))
        return model(batch)

    with pytest.raises(zeroamp.StepError) as caught:
        zeroamp.sensitivity(model, [batch], loss_of)
    for handle in handles:
        handle.remove()
    text = str(caught.value)
    assert text.startswith("sensitivity failed on rank 1: sensitivity: the run in fp32 does not fit into memory: ")
    assert OUT_OF_MEMORY in text
    assert "Pass several smaller batches" in text


def _out_of_memory_in_forward(model, batch):
    _out_of_memory_on_one_rank(model, batch, is_in_forward=True)


def _out_of_memory_in_backward(model, batch):
    _out_of_memory_on_one_rank(model, batch, is_in_forward=False)


def _raise_in_the_loss(model, batch):
    num = 0

    def loss_of(model, batch):
        nonlocal num
        num += 1
        if num == 4:
            raise ValueError("asked to raise in the loss")
        return model(batch)

    with pytest.raises(ValueError, match="asked to raise"):
        zeroamp.sensitivity(model, [batch], loss_of)


def _raise_in_the_backward(model, batch):
    def loss_of(model, batch):
        loss_of.num += 1
        model.raises = loss_of.num == 4
        return model(batch)

    loss_of.num = 0
    with pytest.raises(ValueError, match="asked to raise"):
        zeroamp.sensitivity(model, [batch], loss_of)
    model.raises = False


def _compared(options, calls):
    *plain, _ = _steps(options, None)
    *found, left = _steps(options, calls)
    return left, _is_equal(plain, found)


def _is_equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return a == b


LEAVES = [({"stage": 0}, _measure), ({"stage": 2, "accumulation": 2}, _measure), ({"stage": 3}, _measure),
          ({"stage": 1, "accumulation": 2, "data_types": {"grad_accum_dtype": "bf16"}}, _measure),
          ({"stage": 3, **FP16}, _measure), ({"stage": 2}, _raise_in_the_loss), ({"stage": 3}, _raise_in_the_loss),
          ({"stage": 0}, _out_of_memory_in_forward), ({"stage": 3}, _out_of_memory_in_forward),
          ({"stage": 2}, _out_of_memory_in_backward), ({"stage": 3}, _out_of_memory_in_backward),
          ({"stage": 2}, _raise_in_the_backward), ({"stage": 3}, _raise_in_the_backward)]  # fmt: skip


@pytest.mark.parametrize(("options", "calls"), LEAVES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_nothing_is_left_behind(ranks2, options, calls):
    """Three steps have the same bits with a call before each, also with one that raises."""
    assert ranks2.run(_compared, options, calls) == [([], True)] * 2


def _gradients_of_a_plain_loop():
    model = _wrapped(switchable.SixModules, {"stage": 2})
    batch = switchable.tokens(dist.get_rank())
    model(batch).backward()
    before = {name: (parameter.grad, parameter.grad.to_local().clone()) for name, parameter in model.named_parameters()}
    zeroamp.sensitivity(model, [batch, batch])
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not before[name][0] or not torch.equal(parameter.grad.to_local(), before[name][1])
    ]


def test_gradients_that_were_there_are_put_aside(ranks2):
    assert ranks2.run(_gradients_of_a_plain_loop) == [[], []]


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
    "open step": ("StepError", "sensitivity was called after 1 micro-batch"),
    "after a forward": ("StepError", "must be called between two optimizer steps, but embed.weight is unsharded"),
    "no batch": ("StepError", "must be a list of batches, but is an empty list"),
    "no list": ("StepError", "must be a list of batches, but is a Tensor. Pass [batch]"),
    "one sample": ("StepError", "got one batch of 1 sample(s). Pass two batches"),
    "other shapes": ("StepError", "the shapes of batch 0 is [(4, 8)] on rank 0, but [(5, 8)] on rank 1"),
    "fp32": ("ConfigError", "the config sets fp32 precision. Wrap the model with"),
    "bf16": ("ConfigError", '"dtype": "bfloat16"} for the measurement, in place of "bf16".'),
    "fp16": ("ConfigError", '"dtype": "float16"} for the measurement, in place of "fp16".'),
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
