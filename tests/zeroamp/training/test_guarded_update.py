"""A guarded update is launched before the host knows whether the step is skipped. A skipped step changes nothing."""

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
from zeroamp.training.update import OptimizerUpdate

NAME = "llama_tied"
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"weight_decay": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}
FP16 = config(3, dtype="float16", fp16={"initial_scale_power": 4, "hysteresis": 1})


class Guards:
    """Counts the updates with `found_inf`, and those without it."""

    def __init__(self):
        self.guarded = self.others = 0
        real = OptimizerUpdate.step

        def step(update, found_inf=None, grad_scale=None, **kwargs):
            self.guarded += found_inf is not None
            self.others += found_inf is None
            return real(update, found_inf, grad_scale, **kwargs)

        self.patch = mock.patch.object(OptimizerUpdate, "step", step)

    def __enter__(self):
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


class Between(zeroamp.Callback):
    """A callback of the caller that runs before the update, so that the host reads the sums before the update."""

    def before_update(self):
        pass


def _state(optimizer, model):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]} {name}": (value.to_local() if isinstance(value, DTensor) else value).clone()
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
        if value is not None
    }


def _train(kind, cfg, bad_steps, waits, num_steps=6, kwargs=None):
    """Train; in some steps the loss of rank 1 overflows. Return what changed in those steps, and the final state."""
    model = wrapped(NAME, cfg)
    factory, arguments = OPTIMIZERS[kind]
    optimizer = factory(model.parameters(), lr=1e-2, fused=True, **arguments, **(kwargs or {}))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = zeroamp.TrainStep(model, optimizer, scheduler)
    if waits:
        step.callbacks.append(Between())
    changed, rows = [], []
    with Guards() as guards:
        for index in range(num_steps):
            is_bad = index in bad_steps
            factor = math.inf if is_bad and dist.get_rank() == 1 else 1.0
            step.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())) * factor)
            before = full_parameters(model), _state(optimizer, model), scheduler.last_epoch
            report = step.step()
            rows.append((report.skipped, report.num_skipped, report.step, report.loss_scale))
            if is_bad:
                after = full_parameters(model), _state(optimizer, model), scheduler.last_epoch
                changed += [*same_bits(before[0], after[0]), *same_bits(before[1], after[1])]
                changed += ["scheduler"] * (before[2] != after[2])
    return changed, rows, full_parameters(model), _state(optimizer, model), (guards.guarded, guards.others)


def _both(kind, cfg, bad_steps):
    return _train(kind, cfg, bad_steps, False), _train(kind, cfg, bad_steps, True)


@pytest.mark.parametrize("kind", slow_but(OPTIMIZERS, "AdamW"))
def test_an_overflow_changes_nothing_and_all_steps_are_those_that_waited(ranks2, kind):
    bad_steps = (0, 2, 3)
    for guarded, waited in ranks2.run(_both, kind, FP16, bad_steps):
        assert guarded[0] == waited[0] == []
        assert guarded[1] == waited[1]
        assert [row[0] for row in guarded[1]] == [index in bad_steps for index in range(6)]
        assert same_bits(guarded[2], waited[2]) == []
        assert guarded[3].keys() == waited[3].keys()
        assert same_bits(guarded[3], waited[3]) == []
        # The host waits until the optimizer has state, which a skipped step does not make. Plain SGD has no state.
        assert guarded[4] == ((6, 0) if kind == "SGD" else (4, 1))
        assert waited[4] == (0, 3)


@pytest.mark.parametrize("scale", [1024, 1000])
def test_gradients_are_unscaled_to_the_same_bits(ranks2, scale):
    """The update divides gradients by a power of two. For another scale they are multiplied before the update."""
    cfg = config(2, dtype="float16", fp16={"loss_scale": scale})
    for guarded, waited in ranks2.run(_both, "AdamW", cfg, ()):
        assert guarded[1] == waited[1]
        assert same_bits(guarded[2], waited[2]) == []
        assert guarded[4] == (5, 1)


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
    with Guards() as guards:
        for index in range(3):
            optimizer.param_groups[0]["lr"] = 0.1 + (index == 2) * dist.get_rank()
            step.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())))
            before = full_parameters(model), _state(optimizer, model)
            if index < 2:
                step.step()
    with pytest.raises(zeroamp.StepError) as raised, guards:
        step.step()
    after = full_parameters(model), _state(optimizer, model)
    return str(raised.value), [*same_bits(before[0], after[0]), *same_bits(before[1], after[1])], guards.guarded


def test_ranks_that_differ_update_nothing(ranks2):
    for text, changed, num_guarded in ranks2.run(_differs):
        assert text.startswith("This optimizer step differs between ranks: lr")
        assert text.endswith("Nothing was updated in it.")
        assert (changed, num_guarded) == ([], 2)


def _after_clip():
    """`clip_grad_norm` and `update` in two calls: the host knows in between."""
    model = wrapped(NAME, FP16)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    with Guards() as guards:
        for index in range(3):
            step.backward(loss_of(model, batch(NAME, index)) * (math.inf if index == 2 else 1.0))
            norm = step.clip_grad_norm()
            scale = step.loss_scale
            squares = sum(p.grad.full_tensor().double().square().sum() for p in model.parameters())
            report = step.update()
    return guards.guarded, float(norm), float(squares), scale, report.skipped


def test_between_clip_grad_norm_and_update_the_host_knows_of_an_overflow(ranks2):
    for guarded, norm, _, scale, skipped in ranks2.run(_after_clip):
        assert (guarded, scale, skipped) == (0, 8.0, True)
        assert not math.isfinite(norm)
