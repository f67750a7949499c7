"""`torch.optim.Muon` in a `TrainStep`: the bits of one process, one owner per matrix, and what it moves."""

from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.processes.optimizers import NAME
from tests.processes.training import config, full_parameters, same_bits, wrapped
from tests.selection import slow_but
from zeroamp.hooks.collectives.traffic import TrafficKey
from zeroamp.optimizers import muon

NUM_STEPS = 3
TO_STEP = TrafficKey("all_to_all", torch.bfloat16, "step")
OPTIONS = {
    "default": {},
    "plain": {"nesterov": False, "momentum": 0.9, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
    "tensor": {"lr": torch.tensor([3e-3]), "ns_steps": 3},
}


def _is_matrix(fqn, parameter):
    return parameter.dim() == 2 and not fqn.startswith(("embed", "head"))


def _optimizers(parameters, options="default"):
    """Muon in two param groups, and AdamW for all that is no hidden matrix."""
    matrices = [parameter for fqn, parameter in parameters.items() if _is_matrix(fqn, parameter)]
    others = [parameter for fqn, parameter in parameters.items() if not _is_matrix(fqn, parameter)]
    groups = [{"params": matrices[:1], "weight_decay": 0.2}, {"params": matrices[1:]}]
    return [torch.optim.Muon(groups, **{"lr": 1e-2, **OPTIONS[options]}), torch.optim.AdamW(others, lr=1e-2)]


def _trained(stage, mesh_shape=None, clip=0.0, options="default"):
    """Norms, parameters, matrices orthogonalized here, and what this rank sent of them."""
    model = wrapped(NAME, config(stage, clip=clip), mesh_shape=mesh_shape)
    optimizers = _optimizers(dict(model.named_parameters()), options)
    schedules = [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0) for optimizer in optimizers]
    train = zeroamp.TrainStep(model, optimizers, schedules)
    shapes, norms, function = [], [], muon.orthogonalized

    def noted(matrix, *settings):
        shapes.append(tuple(matrix.shape))
        return function(matrix, *settings)

    with mock.patch.object(muon, "orthogonalized", noted):
        for index in range(NUM_STEPS):
            train.backward(loss_of(model, batch(NAME, index * dist.get_world_size() + dist.get_rank())))
            norms.append(train.step().grad_norm)
    traffic = zeroamp.traffic(model)
    return norms, full_parameters(model), shapes, (traffic.calls[TO_STEP], traffic.num_bytes[TO_STEP])


def _check(ranks, stage, mesh_shape=None, clip=0.0, options="default"):
    _, norms, parameters = one_process.train(
        NAME,
        world_size=ranks.world_size,
        num_steps=NUM_STEPS,
        clip=clip,
        num_replicas=1 if mesh_shape is None else mesh_shape[0],
        make_optimizers=lambda found: _optimizers(found, options),
    )
    found = ranks.run(_trained, stage, mesh_shape, clip, options)
    for ours, theirs, _, _ in found:
        assert ours == norms
        assert same_bits(theirs, parameters) == []
    return [each[2:] for each in found]


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 3))
def test_the_bits_are_those_of_one_process(ranks2, stage):
    _check(ranks2, stage, clip=0.5, options=("tensor", "default", "default", "plain")[stage])


def _in_plain_loop(stage):
    """Without `TrainStep`, both ranks with the same batches."""
    model = wrapped(NAME, config(stage))
    return _plain_loop(model, model), full_parameters(model)


def _plain_loop(model, root):
    optimizers, losses = _optimizers(dict(root.named_parameters())), []
    for index in range(NUM_STEPS):
        loss = loss_of(model, batch(NAME, index))
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 3))
def test_a_loop_without_train_step_has_them_too(ranks2, stage):
    model = build(NAME)

    def under_autocast(tokens):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(tokens)

    expected = _plain_loop(under_autocast, model)
    for losses, parameters in ranks2.run(_in_plain_loop, stage):
        assert losses == expected
        assert same_bits(parameters, dict(model.named_parameters())) == []


def _refused_in_plain_loop():
    model = wrapped(NAME, config(3))
    matrices = [p for fqn, p in model.named_parameters() if _is_matrix(fqn, p)]
    optimizer = torch.optim.Muon(matrices, lr=1e-2)
    loss_of(model, batch(NAME, 0)).backward()
    before = [each.grad for each in matrices]
    with pytest.raises(zeroamp.StepError, match="closure"):
        optimizer.step(lambda: None)
    optimizer.step()
    return all(each.grad is grad for each, grad in zip(matrices, before, strict=True))


def test_in_such_a_loop_gradients_stay_and_closures_are_refused(ranks2):
    assert all(ranks2.run(_refused_in_plain_loop))


@pytest.mark.slow
def test_so_they_are_on_replicas_of_shards(ranks4):
    _check(ranks4, 3, mesh_shape=(2, 2))


def test_each_matrix_is_orthogonalized_on_one_rank_and_moved_once_each_way(ranks2):
    found = ranks2.run(_trained, 3)
    shapes = sorted(tuple(p.shape) for fqn, p in build(NAME).named_parameters() if _is_matrix(fqn, p))
    assert sorted(shape for each in found for shape in each[2]) == sorted(shapes * NUM_STEPS)
    work = [sum(rows * columns * min(rows, columns) for rows, columns in each[2]) for each in found]
    largest = max(rows * columns * min(rows, columns) for rows, columns in shapes)
    assert max(work) - min(work) <= largest * NUM_STEPS
    numel = sum(rows * columns for rows, columns in shapes)
    calls, num_bytes = zip(*(each[3] for each in found), strict=True)
    assert calls == (4 * NUM_STEPS,) * 2  # two param groups: shards to the owners, and the results back
    assert sum(num_bytes) == 2 * 2 * numel * NUM_STEPS


def _with_unknown_option():
    model = wrapped(NAME, config(3))
    train = zeroamp.TrainStep(model, _optimizers(dict(model.named_parameters())))
    train.optimizers[0].defaults["warmup"] = 3
    train.backward(loss_of(model, batch(NAME, 0)))
    with pytest.raises(zeroamp.StepError) as error:
        train.step()
    return str(error.value)


def test_an_option_of_a_newer_torch_is_refused_by_name(ranks2):
    assert "has the option warmup" in ranks2.run(_with_unknown_option)[0]


def _with_ignored_matrix():
    model = build("llama_tied")
    own = model.blocks[0].out.weight
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)), ignored_params={own})
    matrices = [p for fqn, p in model.named_parameters() if _is_matrix(fqn, p)]
    train = zeroamp.TrainStep(model, torch.optim.Muon(matrices, lr=1e-2))
    before = own.detach().clone()
    train.backward(loss_of(model, batch("llama_tied", 0)))
    gradient = own.grad.clone()
    train.step()
    alone = nn.Parameter(before.clone())
    alone.grad = gradient
    torch.optim.Muon([alone], lr=1e-2).step()
    return torch.equal(alone, own), not torch.equal(before, own)


def test_a_matrix_that_is_not_sharded_is_updated_where_it_is(ranks2):
    assert ranks2.run(_with_ignored_matrix) == [(True, True)] * 2


def _with_hooks():
    model = wrapped(NAME, config(3))
    train = zeroamp.TrainStep(model, _optimizers(dict(model.named_parameters())))
    (first, *_) = train.optimizers[0].param_groups[0]["params"]
    seen = [first.to_local().clone()]

    def note(*_):
        seen.append(first.to_local().clone())

    train.optimizers[0].register_step_pre_hook(note)
    train.optimizers[0].register_step_post_hook(note)
    train.backward(loss_of(model, batch(NAME, 0)))
    train.clip_grad_norm()
    gradient = first.grad
    train.update()
    seen.append(first.to_local().clone())
    is_same = [torch.equal(one, other) for one, other in pairwise(seen)]
    return is_same, gradient is not None, first.grad is None, len(train.optimizers[0]._optimizer_step_pre_hooks)


def test_step_hooks_of_the_caller_run_around_the_update(ranks2):
    assert ranks2.run(_with_hooks) == [([True, False, True], True, True, 1)] * 2
