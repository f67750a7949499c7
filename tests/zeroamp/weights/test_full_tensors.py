"""Whole gradients, parameters and optimizer state of a wrapped model, at every stage and mesh."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zeroamp
from tests.processes.training import config, policy
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
    return [_tree_sum(each) / len(each) for each in zip(*gradients, strict=True)]


def _tree_sum(values):
    half = len(values) // 2
    return values[0] if half == 0 else _tree_sum(values[:half]) + _tree_sum(values[half:])


def _wrapped(cfg, mesh_shape=None):
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    model = zeroamp.wrap_model(_plain(), policy(cfg), mesh, {"Linear"})
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


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_they_are_those_of_plain_torch(ranks2, stage):
    assert ranks2.run(_read, config(stage, clip=0.1), torch.bfloat16) == [[], []]


def test_gradients_are_without_the_loss_scale(ranks2):
    cfg = config(3, dtype="float16", fp16={"initial_scale_power": 8}, clip=0.1)
    assert ranks2.run(_read, cfg, torch.float16) == [[], []]


def test_shards_on_the_cpu(ranks2):
    assert ranks2.run(_read, {**config(3), **OFFLOAD}, torch.bfloat16) == [[], []]


def test_replicas(ranks4):
    assert ranks4.run(_read, config(3, dtype=None), None, (2, 2)) == [[]] * 4


def _accumulated(cfg):
    """Whole gradients after the last of three micro-batches are those of the step; before it they are refused."""
    model, train = _wrapped(cfg)
    first = next(model.parameters())
    texts = []
    for micro in range(3):
        train.backward(_loss(model, _inputs(micro, dist.get_rank())))
        inside = next(model.parameters())  # unsharded, at stages below 3
        texts.append(None)
        if micro < 2:
            with pytest.raises(StepError) as caught:
                zeroamp.full_gradient(inside)
            texts[-1] = str(caught.value)
            with pytest.raises(StepError, match="two optimizer steps"):
                zeroamp.set_full_parameter(inside, zeroamp.full_parameter(inside))
            assert torch.equal(zeroamp.full_parameter(inside), zeroamp.full_parameter(first))
            assert zeroamp.full_parameter(inside).dtype == torch.float32
        else:
            squares = [zeroamp.full_gradient(p) for p in model.parameters() if p.requires_grad]
        report = train.step()
    norm = float(torch.stack([g.double().square().sum() for g in squares]).sum().sqrt())
    assert norm == pytest.approx(report.grad_norm, rel=1e-6)
    return texts


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
@pytest.mark.parametrize("accumulate", ["fp32", "bf16"])
def test_gradients_are_refused_before_the_last_micro_batch(ranks2, stage, accumulate):
    cfg = config(stage, accumulation=3, data_types={"grad_accum_dtype": accumulate})
    for texts in ranks2.run(_accumulated, cfg):
        assert texts[2] is None
        assert all("full_gradient was called before the last micro-batch" in text for text in texts[:2])


def _refused():
    model, train = _wrapped(config(3))
    weight = next(model.parameters())
    texts = []
    for call in (
        lambda: zeroamp.full_parameter(nn.Parameter(torch.ones(2))),
        lambda: zeroamp.full_gradient(copy.copy(weight)),
        lambda: zeroamp.set_full_parameter(weight, torch.ones(4, 5)),
    ):
        with pytest.raises(StepError) as caught:
            call()
        texts.append(str(caught.value))
    train.backward(_loss(model, _inputs(0, 0)))
    train.step()
    value = zeroamp.full_parameter(weight)
    value.zero_()
    assert zeroamp.full_parameter(weight).any()  # it is a copy
    return texts


def test_what_is_wrong_is_named(ranks2):
    for texts in ranks2.run(_refused):
        expected = [
            "A parameter of shape (2,) is not one of a wrapped model. Pass one that model.named_parameters() yields",
            "is not one of a wrapped model",
            "The value to set must be of the whole shape, (5, 4), but is of shape (4, 5)",
        ]
        assert [part for part, text in zip(expected, texts, strict=True) if part not in text] == []
