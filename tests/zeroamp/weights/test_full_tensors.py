"""Whole gradients, parameters and optimizer state of a wrapped model, at every stage and mesh."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zeroamp
from tests.oracles.one_process import tree
from tests.processes.training import config, mesh_of, policy
from tests.selection import slow_but
from zeroamp import StepError

OFFLOAD = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
}
KEYS = ("exp_avg", "exp_avg_sq")


def _plain():
    """Rows that divide by no number of ranks, fewer rows than ranks, a frozen and an unused parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[2].bias.requires_grad_(False)
    return model


def _inputs(step, rank):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model, x):
    return model(x).float().square().mean()


def _mean_gradients(plain, step, dtype):
    """The oracle: gradients of all ranks' losses, averaged in fp32, in one process."""
    gradients = []
    for rank in range(dist.get_world_size()):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = _loss(plain, _inputs(step, rank))
        trainable = [p for p in plain.parameters() if p.requires_grad]
        gradients.append(torch.autograd.grad(loss, trainable))
    return [tree(each) / len(each) for each in zip(*gradients, strict=True)]


def _wrapped(cfg, mesh_shape=None):
    model = zeroamp.wrap_model(_plain(), policy(cfg), mesh_of(mesh_shape), {"Linear"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, zeroamp.TrainStep(model, optimizer)


def _same(pairs):
    return [name for name, ours, theirs in pairs if not torch.equal(ours, theirs)]


def _whole(state):
    return state.full_tensor() if isinstance(state, DTensor) else state  # the step count


def _read(cfg, dtype, mesh_shape=None):
    """Return what differs from plain torch: gradients before the clip, parameters and state after the update."""
    model, train = _wrapped(cfg, mesh_shape)
    plain = _plain()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    differing = []
    for step in range(2):
        trainable = [(name, p) for name, p in plain.named_parameters() if p.requires_grad]
        for (_, parameter), gradient in zip(trainable, _mean_gradients(plain, step, dtype), strict=True):
            parameter.grad = gradient
        train.backward(_loss(model, _inputs(step, dist.get_rank())))
        ours = dict(model.named_parameters())
        assert zeroamp.full_gradient(ours["2.bias"]) is None
        differing += _same((f"{n}.grad", zeroamp.full_gradient(ours[n]), p.grad) for n, p in trainable)
        if cfg["gradient_clipping"]:
            nn.utils.clip_grad_norm_(plain.parameters(), cfg["gradient_clipping"])
        train.clip_grad_norm()
        for name, parameter in trainable:  # the norm's last bits may differ from torch's
            torch.testing.assert_close(zeroamp.full_gradient(ours[name]), parameter.grad, rtol=1e-5, atol=0)
            parameter.grad = zeroamp.full_gradient(ours[name])
        train.update()
        optimizer.step()
        ours = dict(model.named_parameters())
        differing += _same((n, zeroamp.full_parameter(ours[n]), p.detach()) for n, p in plain.named_parameters())
        for key in (*KEYS, "step"):
            differing += _same(
                (f"{n}.{key}", _whole(train.optimizers[0].state[ours[n]][key]), optimizer.state[p][key])
                for n, p in trainable
            )
    return differing


FP16 = config(3, dtype="float16", fp16={"initial_scale_power": 8}, clip=0.1)
CASES = {
    **{f"stage {stage}": (config(stage, clip=0.1), torch.bfloat16) for stage in range(4)},
    "with a loss scale": (FP16, torch.float16),
    "offload": ({**config(3), **OFFLOAD}, torch.bfloat16),
}


@pytest.mark.parametrize("case", slow_but(CASES, "stage 0", "stage 3", "with a loss scale"))
def test_they_are_those_of_plain_torch(ranks2, case):
    assert ranks2.run(_read, *CASES[case]) == [[], []]


def test_they_are_those_of_plain_torch_on_replicas_of_shards(ranks4):
    assert ranks4.run(_read, config(3, dtype=None), None, (2, 2)) == [[]] * 4


def _accumulated(cfg):
    """Whole gradients after the last of three micro-batches are those of the step; before it they are refused."""
    model, train = _wrapped(cfg)
    first = next(model.parameters())
    for micro in range(3):
        train.backward(_loss(model, _inputs(micro, dist.get_rank())))
        inside = next(model.parameters())  # unsharded, at stages below 3
        if micro < 2:
            with pytest.raises(StepError, match="full_gradient was called before the last micro-batch"):
                zeroamp.full_gradient(inside)
            with pytest.raises(StepError, match="two optimizer steps"):
                zeroamp.set_full_parameter(inside, zeroamp.full_parameter(inside))
            assert torch.equal(zeroamp.full_parameter(inside), zeroamp.full_parameter(first))
            assert zeroamp.full_parameter(inside).dtype == torch.float32
        else:
            squares = [zeroamp.full_gradient(p) for p in model.parameters() if p.requires_grad]
        report = train.step()
    norm = float(torch.stack([g.double().square().sum() for g in squares]).sum().sqrt())
    assert norm == pytest.approx(report.grad_norm, rel=1e-6)


@pytest.mark.parametrize(("stage", "accumulate"), [(0, "fp32"), (2, "bf16")])
def test_gradients_are_refused_before_the_last_micro_batch(ranks2, stage, accumulate):
    ranks2.run(_accumulated, config(stage, accumulation=3, data_types={"grad_accum_dtype": accumulate}))


def _refused():
    model, train = _wrapped(config(3))
    weight = next(model.parameters())
    for call, text in (
        (
            lambda: zeroamp.full_parameter(nn.Parameter(torch.ones(2))),
            r"A parameter of shape \(2,\) is not one of a wrapped model. Pass one that model.named_parameters",
        ),
        (lambda: zeroamp.full_gradient(copy.copy(weight)), "is not one of a wrapped model"),
        (
            lambda: zeroamp.set_full_parameter(weight, torch.ones(4, 5)),
            r"The value to set must be of the whole shape, \(5, 4\), but is of shape \(4, 5\)",
        ),
    ):
        with pytest.raises(StepError, match=text):
            call()
    train.backward(_loss(model, _inputs(0, 0)))
    train.step()
    value = zeroamp.full_parameter(weight)
    value.zero_()
    assert zeroamp.full_parameter(weight).any()  # it is a copy


def test_what_is_wrong_is_named(ranks2):
    ranks2.run(_refused)
