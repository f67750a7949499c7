"""`Ledger.verify` changes nothing, also when something raises, and refuses where it could not."""

import random
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.ranks import RankError
from tests.processes.training import config, full_parameters, wrapped
from tests.selection import slow_but
from zeroamp.hooks._torch.fsdp import groups_of, unsharded_sums
from zeroamp.hooks.guards import BackwardGuard
from zeroamp.wrapping.state import wrap_state

LOW_SUMS = {"data_types": {"grad_accum_dtype": "bf16"}}
OPTIONS = [
    {"stage": 0, "accumulation": 2},
    {"stage": 1, **LOW_SUMS},
    {"stage": 3, "accumulation": 2},
    {"stage": 2, "accumulation": 2, **LOW_SUMS},
    {"stage": 3, "accumulation": 2, "threshold": 0, **LOW_SUMS},
    {"stage": 3, "dtype": "float16", "fp16": {"initial_scale_power": 4}},
]


def raise_in_backward(_gradient):
    raise ValueError("asked to raise in backward")


class Noisy(nn.Module):
    """Batch statistics, random numbers of four kinds, and a backward that raises if asked to."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(3)
        )
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)
        self.generator = torch.Generator().manual_seed(3)
        self.raises = False

    def forward(self, x):
        x = x + torch.rand(x.shape, generator=self.generator)
        self.calls = self.calls + 1
        self.last = x.detach().mean()
        x = x * (1 + random.random() + np.random.random())
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.raises and index == 1:
                x.register_hook(raise_in_backward)
        return x


def noisy(options):
    torch.manual_seed(0)
    model = zeroamp.wrap_model(Noisy(), zeroamp.policy_from_config(config(**options)), auto_wrap_policy={"Sequential"})
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(dist.get_rank())
    return model, step


def inputs(index=0):
    generator = torch.Generator().manual_seed(index * 10 + dist.get_rank())
    return torch.randn(4, 8, generator=generator)


def square(output):
    return output.float().square().mean()


def train(model, step, num_steps=2):
    reports = []
    for index in range(num_steps):
        report = None
        while report is None:
            step.backward(square(model(inputs(index))))
            report = step.step()
        reports.append((report.loss, report.grad_norm, report.loss_scale, report.skipped))
    return reports


def verify(model, loss_fn=square):
    zeroamp.explain(model).verify(model, inputs(99), loss_fn=loss_fn)


def raise_in_the_loss(model):
    def refuse(output):
        raise ValueError("asked to raise in loss_fn")

    with pytest.raises(ValueError, match="asked to raise"):
        verify(model, refuse)


def verify_in_inference_mode(model):
    with torch.inference_mode():
        verify(model)


ATTEMPTS = {"verify": verify, "raises": raise_in_the_loss, "inference mode": verify_in_inference_mode}


def _hooks(model):
    modules = [
        len(hooks)
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    ]
    gathered = [
        list(p._unsharded_param._backward_hooks or {})
        for unit in model.modules()
        if isinstance(unit, FSDPModule)
        for group in groups_of(unit._get_fsdp_state())
        for p in group.fsdp_params
        if hasattr(p, "_unsharded_param")
    ]
    sharded = [len(getattr(p, "_post_accumulate_grad_hooks", None) or {}) for p in model.parameters()]
    return modules, [hooks for hooks in gathered if hooks], sharded


def _everything(model, step):
    state = wrap_state(model)
    traffic = state.traffic
    return {
        "parameters": {fqn: p.to_local().clone() for fqn, p in model.named_parameters()},
        "kept": [type(p) is nn.Parameter or isinstance(p, DTensor) for p in model.parameters()],
        "gradients": [p.grad for p in model.parameters()],
        "sums": [fqn for unit in model.modules() if isinstance(unit, FSDPModule) for fqn in unsharded_sums(unit)],
        "buffers": {name: None if b is None else (id(b), b.clone()) for name, b in _buffers(model)},
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "traffic": (dict(traffic.calls), dict(traffic.num_bytes), traffic.enabled, len(state.listeners)),
        "hooks": _hooks(model),
        "training": [module.training for module in model.modules()],
        "steps taken": (step.num_steps, step.num_skipped, step.loss_scale),
        "step": str(state.step),
        "forwards": state.root_forward.depth,
        "guard": BackwardGuard.armed,
        "reshards": [
            (g.reshard_after_backward, g.reduce_grads)
            for unit in model.modules()
            if isinstance(unit, FSDPModule)
            for g in groups_of(unit._get_fsdp_state())
        ],
        "last": model._get_fsdp_state()._state_ctx.is_last_backward,
        "grad mode": torch.is_grad_enabled(),
    }


def _buffers(model):
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            yield f"{fqn}.{name}", buffer


def _differences(before, after, key=""):
    if isinstance(before, dict):
        assert before.keys() == after.keys(), key
        return [d for name in before for d in _differences(before[name], after[name], f"{key}.{name}")]
    if isinstance(before, tuple | list):
        if len(before) != len(after):
            return [key]
        return [d for a, b in zip(before, after, strict=True) for d in _differences(a, b, key)]
    same = torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
    return [] if same else [key]


def _trained(options, attempt):
    """Three steps, with an attempt to verify before the first and the last; what that left, and all results."""
    model, step = noisy(options)
    model.blocks[2].eval()
    left, reports = [], []
    for index in range(3):
        if attempt is not None and index != 1:
            before = _everything(model, step)
            ATTEMPTS[attempt](model)
            left += _differences(before, _everything(model, step))
        reports += train(model, step, 1)
    results = {
        "reports": reports,
        "parameters": full_parameters(model),
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "random": (torch.rand(2).tolist(), random.random(), float(np.random.random())),
        "num_steps": step.num_steps,
    }
    return left, results


def _compare(options, attempt):
    _, plain = _trained(options, None)
    assert plain["buffers"]["calls"] == 3 * options.get("accumulation", 1)
    left, results = _trained(options, attempt)
    return left + _differences(plain, results)


@pytest.mark.parametrize("options", slow_but(OPTIONS, OPTIONS[2]), ids=str)
def test_nothing_is_left_and_training_goes_on_with_the_same_bits(ranks2, options):
    assert ranks2.run(_compare, options, "verify") == [[], []]


@pytest.mark.parametrize("attempt", ["raises", "inference mode"])
def test_nothing_is_left_by_a_verification_that_raises(ranks2, attempt):
    """Nothing is left by a verification that raises or runs in another grad mode."""
    assert ranks2.run(_compare, OPTIONS[2], attempt) == [[], []]


def _after_a_backward_that_raised():
    model, step = noisy({"stage": 3})
    model.raises = True
    with pytest.raises(ValueError, match="asked to raise"):
        verify(model)
    model.raises = False
    train(model, step)


def test_training_does_not_go_on_after_an_observed_backward_that_raised(ranks2):
    with pytest.raises(
        RankError, match=r"failure in backward .ValueError: asked to raise in backward.\. Load the last"
    ):
        ranks2.run(_after_a_backward_that_raised)


def _refused(options, how):
    model, step = noisy(options)
    if how == "after a forward":
        model(inputs())
    elif how == "in a window":
        step.backward(square(model(inputs())))
        if options.get("accumulation", 1) > 1:
            step.step()
    elif how == "on one rank" and dist.get_rank() == 1:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(zeroamp.StepError) as caught:
        verify(model)
    return str(caught.value)


PENDING = [
    (OPTIONS[0], "in a window", "^Ledger.verify .*between two optimizer steps"),
    (OPTIONS[4], "in a window", "^Ledger.verify .*between two optimizer steps, but gradients .* are accumulated"),
    ({"stage": 1}, "after a forward", "unsharded"),
    ({"stage": 3}, "in a window", "blocks.0.0.weight has a gradient"),
    ({"stage": 3}, "on one rank", "^Ledger.verify failed on rank "),
]


@pytest.mark.parametrize(("options", "how", "words"), PENDING, ids=str)
def test_where_a_step_gradients_or_a_forward_are_pending_it_refuses(ranks2, options, how, words):
    first, second = ranks2.run(_refused, options, how)
    assert re.search(words, first, re.DOTALL)
    assert first == second or how != "on one rank"


BAD = [
    ({"batch": [1]}, r"Ledger.verify\(batch=\).*a list"),
    ({"loss_fn": None}, r"a tensor of shape \(4, 8\).*loss_fn"),
    ({"loss_fn": lambda output: output}, r"a tensor of shape \(4, 8\).*loss_fn"),
    (
        {"loss_fn": lambda output: square(output).detach()},
        r"a tensor of shape \(\) that needs no gradient.*loss_fn",
    ),
    ({"loss_fn": lambda _: 1.0}, r"a float.*loss_fn"),
]


def _bad():
    model, _ = noisy({"stage": 3})
    other, _ = noisy({"stage": 2})
    with pytest.raises(zeroamp.WrapError, match=r"explain\(model\)\.verify"):
        zeroamp.explain(other).verify(model, inputs(), loss_fn=square)
    for arguments, words in BAD:
        with pytest.raises(zeroamp.StepError, match=words):
            zeroamp.explain(model).verify(model, **{"batch": inputs(), "loss_fn": square, **arguments})
        verify(model)


def test_what_cannot_be_verified_is_named(ranks2):
    ranks2.run(_bad)


def _batches():
    model = wrapped("hf_llama", config(3))
    tokens = batch("hf_llama", 0)
    ledger = zeroamp.explain(model)
    with_labels = ledger.verify(model, {"input_ids": tokens, "labels": tokens})  # .loss
    as_tuple = ledger.verify(model, (tokens,), loss_fn=lambda output: output.logits.float().mean())
    model = wrapped("llama_tied", config(3))
    ledger = zeroamp.explain(model)
    scalar = ledger.verify(model, tokens)
    loss_of(model, tokens).backward()
    return [len(v.to_dict()["parameters"]) for v in (with_labels, as_tuple, scalar)]


def test_batches_and_losses_of_every_form(ranks2):
    assert ranks2.run(_batches)[0] == [
        len(list(build(name).parameters())) for name in ("hf_llama", "hf_llama", "llama_tied")
    ]
