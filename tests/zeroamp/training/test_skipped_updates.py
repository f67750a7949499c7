"""A step that is skipped changes nothing, with torch's fused optimizers too, whose bits are those of one process."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, loss_of
from tests.oracles import one_process
from tests.processes.training import check_run, config, full_parameters, same_bits, train, wrapped
from tests.selection import slow_but

NAME = "llama_tied"
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"weight_decay": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}
FP16 = config(3, dtype="float16", fp16={"initial_scale_power": 4, "hysteresis": 1})


def _state(optimizer, model):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]} {name}": (value.to_local() if isinstance(value, DTensor) else value).clone()
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
        if value is not None
    }


def _train(kind, cfg, bad_steps, num_steps=6):
    """Train; in some steps the loss of rank 1 overflows. Return what changed in those steps, and the final state."""
    model = wrapped(NAME, cfg)
    factory, arguments = OPTIMIZERS[kind]
    optimizer = factory(model.parameters(), lr=1e-2, fused=True, **arguments)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = zeroamp.TrainStep(model, optimizer, scheduler)
    changed, skipped = [], []
    for index in range(num_steps):
        is_bad = index in bad_steps
        factor = math.inf if is_bad and dist.get_rank() == 1 else 1.0
        step.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())) * factor)
        before = full_parameters(model), _state(optimizer, model), scheduler.last_epoch
        skipped.append(step.step().skipped)
        if is_bad:
            after = full_parameters(model), _state(optimizer, model), scheduler.last_epoch
            changed += [*same_bits(before[0], after[0]), *same_bits(before[1], after[1])]
            changed += ["scheduler"] * (before[2] != after[2])
    return changed, skipped, step.num_steps, step.num_skipped


@pytest.mark.parametrize("kind", slow_but(OPTIMIZERS, "AdamW"))
def test_an_overflow_on_one_rank_changes_nothing(ranks2, kind):
    bad_steps = (0, 2, 3)
    expected = [], [index in bad_steps for index in range(6)], 3, 3
    assert ranks2.run(_train, kind, FP16, bad_steps) == [expected] * 2


def _fused(parameters):
    return [torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.1, fused=True)]


def _train_fused(cfg, num_steps):
    real = torch.optim.AdamW

    def fused(*args, **kwargs):
        return real(*args, fused=True, **kwargs)

    with mock.patch.object(torch.optim, "AdamW", fused):
        return train(NAME, cfg, num_steps)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_bits_are_those_of_torchs_fused_optimizer_in_one_process(ranks2, clip):
    expected = one_process.train(
        NAME,
        world_size=2,
        num_steps=6,
        clip=clip,
        loss_scale=1024.0,
        autocast=torch.float16,
        make_optimizers=_fused,
    )
    cfg = config(3, clip=clip, dtype="float16", fp16={"loss_scale": 1024})
    for rank, run in enumerate(ranks2.run(_train_fused, cfg, 6)):
        check_run(run, rank, expected)


def _differs():
    """The learning rate of rank 1 differs in the third step."""
    model = wrapped(NAME, config(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = zeroamp.TrainStep(model, optimizer)
    for index in range(3):
        optimizer.param_groups[0]["lr"] = 0.1 + (index == 2) * dist.get_rank()
        step.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())))
        before = full_parameters(model), _state(optimizer, model)
        if index < 2:
            step.step()
    with pytest.raises(zeroamp.StepError) as raised:
        step.step()
    after = full_parameters(model), _state(optimizer, model)
    return str(raised.value), [*same_bits(before[0], after[0]), *same_bits(before[1], after[1])]


def test_ranks_that_differ_update_nothing(ranks2):
    for text, changed in ranks2.run(_differs):
        assert text.startswith("This optimizer step differs between ranks: lr")
        assert text.endswith("Nothing was updated in it.")
        assert changed == []


def _after_clip():
    """`clip_grad_norm` and `update` in two calls: the host knows in between."""
    model = wrapped(NAME, FP16)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    for index in range(3):
        step.backward(loss_of(model, batch(NAME, index)) * (math.inf if index == 2 else 1.0))
        norm = step.clip_grad_norm()
        scale = step.loss_scale
        report = step.update()
    return float(norm), scale, report.skipped


def test_between_clip_grad_norm_and_update_the_host_knows_of_an_overflow(ranks2):
    for norm, scale, skipped in ranks2.run(_after_clip):
        assert (scale, skipped) == (8.0, True)
        assert not math.isfinite(norm)
