"""`unwrap_model`: the plain module is back, with full parameters and no hook of ours."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.processes.training import config, full_parameters, policy, same_bits, wrapped
from tests.selection import slow_but

HOOKS = [name for name in vars(nn.Linear(1, 1)) if "hooks" in name and name.startswith("_")]


def _train(model, name, num_steps, start=0):
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    for step in range(start, start + num_steps):
        train.backward(loss_of(model, batch(name, 2 * step + dist.get_rank())))
        train.step()


def _what_is_left(model, plain):
    """Every hook, instance attribute and class that the plain model does not have."""
    left = []
    for (fqn, module), other in zip(model.named_modules(), plain.modules(), strict=True):
        left += [f"{fqn}: {type(module).__name__}"] * isinstance(module, FSDPModule)
        left += [f"{fqn}.{name}" for name in HOOKS if getattr(module, name)]
        left += [f"{fqn}.{name}" for name in vars(module).keys() - vars(other).keys()]
    return left


def _unwrapped(name, cfg, mesh_shape=None, evaluates=False):
    model = wrapped(name, cfg, mesh_shape=mesh_shape)
    plain = build(name)
    zeroamp.register_forward_method(model, "eval")
    _train(model, name, 2)
    before = full_parameters(model)
    if evaluates:
        with torch.no_grad():
            loss_of(model, batch(name, 0))
    same = zeroamp.unwrap_model(model)
    assert same is model
    assert [fqn for fqn, _ in model.named_modules()] == [fqn for fqn, _ in plain.named_modules()]
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    kinds = {type(parameter) for parameter in model.parameters()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = loss_of(model, batch(name, 7))
        plain.load_state_dict(model.state_dict())
        theirs = loss_of(plain, batch(name, 7))
    ours.backward()  # as any module: no hook of FSDP2's is left
    theirs.backward()
    gradients = [torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    assert all(gradients)
    assert torch.equal(ours, theirs)
    return before, full_parameters(model), kinds == {nn.Parameter}, _what_is_left(model, plain)


@pytest.mark.parametrize("name", slow_but(["llama_tied", "conv", "hf_llama"], "llama_tied", "hf_llama"))
@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_are_full_and_nothing_is_left(ranks2, name, stage):
    for before, after, are_plain, left in ranks2.run(_unwrapped, name, config(stage)):
        assert same_bits(before, after) == []
        assert are_plain
        assert left == []


@pytest.mark.parametrize(
    ("options", "mesh_shape"),
    [
        pytest.param(
            {"dtype": None, "bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["norm"]}},
            None,
            marks=pytest.mark.slow,
        ),
        pytest.param({"accumulation": 2, "data_types": {"grad_accum_dtype": "bf16"}}, None, marks=pytest.mark.slow),
        ({}, (2, 2)),
    ],
    ids=["fp32 regions", "low accumulation", "HSDP"],
)
def test_whatever_was_attached(ranks2, ranks4, options, mesh_shape):
    ranks = ranks2 if mesh_shape is None else ranks4
    options = {**options, "accumulation": 1}
    for before, after, are_plain, left in ranks.run(_unwrapped, "llama_tied", config(3, **options), mesh_shape, True):
        assert same_bits(before, after) == []
        assert are_plain
        assert left == []


def _wrapped_again():
    model = wrapped("llama_tied", config(3))
    _train(model, "llama_tied", 2)
    model = zeroamp.unwrap_model(model)
    assert model.head.weight is model.embed.weight, "tied parameters stay tied"
    model = zeroamp.wrap_model(model, policy(config(1)))
    _train(model, "llama_tied", 2, start=2)
    return full_parameters(model)


def test_it_can_be_wrapped_again(ranks2):
    found = ranks2.run(_wrapped_again)
    # Another optimizer each time: the oracle's state starts anew, too.
    assert same_bits(found[0], found[1]) == []
    once = one_process.train("llama_tied", world_size=2, num_steps=2)[2]
    assert same_bits(found[0], once) != [], "the second training did something"


def _not_wrapped():
    zeroamp.unwrap_model(nn.Linear(1, 1))


def test_a_model_that_is_not_wrapped_is_refused(ranks2):
    with pytest.raises(AssertionError, match="WrapError: .*Linear.* not wrapped.*wrap_model"):
        ranks2.run(_not_wrapped)


def _in_the_middle(accumulation):
    name = "llama_tied"
    model = wrapped(name, config(3, accumulation=accumulation))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters()))
    train.backward(loss_of(model, batch(name, 0)))  # the last micro-batch, or not
    with pytest.raises(zeroamp.StepError) as middle:
        zeroamp.unwrap_model(model)
    train.zero_grad()
    model = zeroamp.unwrap_model(model)
    loss = loss_of(model, batch(name, 0))
    texts = [str(middle.value)]
    for call in (lambda: train.backward(loss), train.step, train.clip_grad_norm, train.update, train.zero_grad):
        with pytest.raises(zeroamp.StepError) as after:
            call()
        texts.append(str(after.value))
    return texts


@pytest.mark.parametrize("accumulation", [1, 2])
def test_it_is_refused_in_the_middle_of_an_optimizer_step_and_the_train_step_after_it(ranks2, accumulation):
    for middle, *after in ranks2.run(_in_the_middle, accumulation):
        assert middle.startswith("unwrap_model was called in the middle of an optimizer step")
        assert "TrainStep.zero_grad()" in middle
        methods = ("backward", "step", "clip_grad_norm", "update", "zero_grad")
        for method, text in zip(methods, after, strict=True):
            assert text.startswith(f"TrainStep.{method} was called after unwrap_model")


def _after_a_failure():
    name = "llama_tied"
    model = wrapped(name, config(3))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters()))
    loss = loss_of(model, batch(name, 0))
    loss.register_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        train.backward(loss)
    return isinstance(zeroamp.unwrap_model(model), FSDPModule)


def _interrupt(_):
    raise KeyboardInterrupt


def test_after_a_failure_the_model_can_be_had(ranks2):
    assert ranks2.run(_after_a_failure) == [False, False]
