"""Steps that their caller ends: any number of micro-batches, norm and update apart, several optimizers, `zero_grad`."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor

import zeroamp
from tests.oracles import one_process
from tests.processes.training import Run, SmallTraining, adamw, check_errors, check_runs, config, errors_of, same_bits
from tests.selection import SUMS_ARE_IN_FP32, slow_but
from zeroamp.training.step import step_of

NAME = "two_blocks"
COUNTS = (3, 1)
CLIP = 0.5
FP16 = {"dtype": None, "fp16": {"enabled": True, "loss_scale": 1024}}


def _trained(cfg, how):
    """Train with `COUNTS` micro-batches per step, whose last one is marked by `is_last` or follows `no_sync`."""
    training = SmallTraining(cfg, adamw)
    train = training.train
    losses, norms, mean_losses, index = [], [], [], 0
    for step, count in enumerate(COUNTS):
        losses.append([])
        for micro in range(count):
            loss = training.loss(index)
            index += 1
            losses[-1].append(float(loss.detach()))
            is_last = micro + 1 == count
            with train.no_sync() if how == "no_sync" and not is_last else nullcontext():
                flags = {"is_last": is_last} if how == "is_last" else {}
                train.backward(loss.float() / count, divide=False, **flags)
        if how == "is_last":
            norm = train.clip_grad_norm()
            report = train.update()
            assert torch.equal(norm, report.grad_norm_tensor)
        else:
            report = train.step()
        assert report.step == step + 1
        assert step_of(train).is_between_steps
        norms.append(report.grad_norm)
        mean_losses.append(report.loss)
    return Run(losses=losses, norms=norms, parameters=training.parameters(), mean_losses=mean_losses)


def _at_stages(stages, options, how):
    return [_trained(config(stage, clip=CLIP, **options), how) for stage in stages]


IN_FP16 = {"autocast": None, "low_model": torch.float16, "loss_scale": 1024.0}


@pytest.mark.parametrize(
    ("stages", "options", "oracle", "how"),
    [
        ((0, 1), {}, {}, "no_sync"),
        ((2, 3), {}, {"reduce_each": True}, "is_last"),
        pytest.param(
            (0, 1),
            FP16,
            IN_FP16,
            "is_last",
            marks=pytest.mark.skipif(SUMS_ARE_IN_FP32, reason="the weights are tied: see docs/limits.md"),
        ),
        ((2, 3), FP16, {**IN_FP16, "reduce_each": True}, "no_sync"),
    ],
    ids=["stages 0 and 1", "stages 2 and 3", "fp16, stages 0 and 1", "fp16, stages 2 and 3"],
)
def test_any_number_of_micro_batches_equals_one_process(ranks2, stages, options, oracle, how):
    expected = one_process.train(NAME, world_size=2, num_steps=len(COUNTS), accumulation=COUNTS, clip=CLIP, **oracle)
    check_runs(ranks2.run(_at_stages, stages, options, how), expected)


def _between_norm_and_update():
    """Return the norm, and the norms of the gradients before and after clipping at 0.1."""
    answers = {}
    for max_norm in (0, 0.1, None):
        training = SmallTraining(config(2, clip=0.05, **FP16))
        training.backward(is_last=True)
        norm = training.train.clip_grad_norm(max_norm)
        gradients = [parameter.grad for parameter in training.model.parameters()]
        assert all(isinstance(gradient, DTensor) and gradient.dtype == torch.float32 for gradient in gradients)
        found = torch.stack([gradient.full_tensor().double().norm() for gradient in gradients]).norm()
        answers[max_norm] = float(norm), float(found)
        training.train.update()
        assert all(parameter.grad is None for parameter in training.model.parameters())
    return answers


def test_between_norm_and_update_gradients_are_unscaled_and_clipped(ranks2):
    for answers in ranks2.run(_between_norm_and_update):
        norms = {norm for norm, _ in answers.values()}
        assert len(norms) == 1, "the norm is the one before clipping, whatever it is clipped to"
        found = {max_norm: norm for max_norm, (_, norm) in answers.items()}
        assert found[0] == pytest.approx(norms.pop(), rel=1e-6)  # summed in another order
        assert found[0.1] == pytest.approx(0.1, rel=1e-4)  # max_norm / (norm + 1e-6)
        assert found[None] == pytest.approx(0.05, rel=1e-4), "None is the config's"


def _lose_gradients(training):
    """Discard the gradients of a micro-batch that was given as the last one and is not."""
    training.backward(100, is_last=True)
    step_of(training.train).backward(training.loss(101), last=False)
    training.optimizer.zero_grad()
    for _ in range(2):
        with pytest.raises(zeroamp.StepError, match="between two micro-batches"):
            training.backward(102, is_last=True)


def _run_micro_batches(training):
    for micro in range(2):
        training.backward(100 + micro, is_last=False)
    assert not step_of(training.train).is_between_steps


def _leave_gradients(training):
    """As another model's backward does."""
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def _with_zero_grad(stage, mesh_shape=None):
    """Train three steps: as they are, and with micro-batches and gradients in between that are given up."""
    found = []
    for gives_up in (False, True):
        training = SmallTraining(config(stage, accumulation=2, clip=CLIP), adamw, mesh_shape=mesh_shape)
        norms = []
        for step, fault in enumerate((_lose_gradients, _run_micro_batches, _leave_gradients)):
            if gives_up:
                fault(training)
                training.train.zero_grad()
                assert step_of(training.train).is_between_steps
            reports = [training.step(2 * step + micro) for micro in range(2)]
            norms.append(reports[-1].grad_norm)
        found.append((norms, training.parameters()))
    (norms, parameters), (norms_after, parameters_after) = found
    return norms == norms_after, same_bits(parameters, parameters_after)


@pytest.mark.parametrize("stage", slow_but([0, 1, 3], 0, 3))
def test_zero_grad_gives_up_a_step_and_leaves_no_trace(ranks2, stage):
    assert ranks2.run(_with_zero_grad, stage) == [(True, [])] * 2


def test_zero_grad_gives_up_a_step_of_replicas(ranks4):
    """Also gradients that are already summed over replicas, and set aside by a later backward."""
    assert ranks4.run(_with_zero_grad, 2, (2, 2)) == [(True, [])] * 4


def _halves(parameters):
    return [torch.optim.AdamW(parameters[::2], lr=1e-2), torch.optim.AdamW(parameters[1::2], lr=1e-3)]


def _one_of_two_groups(parameters):
    return torch.optim.AdamW([{"params": parameters[::2], "lr": 1e-2}, {"params": parameters[1::2], "lr": 1e-3}])


def _scheduled_halves(optimizers):
    return [torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 0.9**step), None]


def _scheduled_groups(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda _step: 1.0])


def _update(train):
    train.update()


def _one_by_one(train):
    step_of(train).apply(train.optimizers[0])
    train.update(train.optimizers[1:])


def _optimizers(make_optimizer, make_scheduler, update):
    """The reports and parameters of two steps."""
    training = SmallTraining(config(3, clip=CLIP), make_optimizer, make_scheduler)
    rows = []
    for step in range(2):
        training.backward(step)
        norm = float(training.train.clip_grad_norm())
        update(training.train)
        rates = [group["lr"] for optimizer in training.train.optimizers for group in optimizer.param_groups]
        rows.append((norm, rates, training.train.num_steps))
    return rows, training.parameters()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ((_one_of_two_groups, _scheduled_groups, _update), (_halves, _scheduled_halves, _update)),
        ((_halves, None, _update), (_halves, None, _one_by_one)),
    ],
    ids=["with one norm", "one by one"],
)
def test_several_optimizers_step_as_one(ranks2, one, two):
    for (rows, ours), (expected, theirs) in zip(
        ranks2.run(_optimizers, *two), ranks2.run(_optimizers, *one), strict=True
    ):
        assert rows == expected
        assert same_bits(ours, theirs) == []


def _first_only():
    """Which parameters change where only the first of two optimizers steps."""
    training = SmallTraining(config(2), _halves)
    before = training.parameters()
    training.backward()
    training.train.clip_grad_norm()
    step_of(training.train).apply(training.train.optimizers[0])
    training.train.update([])
    return same_bits(training.parameters(), before), list(before)[::2], training.train.num_steps


def test_parameters_of_optimizers_that_are_left_out_stay(ranks2):
    for changed, held, num_steps in ranks2.run(_first_only):
        assert changed == held
        assert num_steps == 1


def backward(**flags):
    return lambda training: training.backward(**flags)


def call(name, *args):
    return lambda training: getattr(training.train, name)(*args)


def inside_no_sync(*calls):
    def run(training):
        with training.train.no_sync():
            _call(training, calls)

    return run


def _call(training, calls):
    for each in calls:
        each(training)


MORE, LAST, COUNTED = backward(is_last=False), backward(is_last=True), backward()
STEP, CLIP_NORM, UPDATE = call("step"), call("clip_grad_norm"), call("update")
OTHER = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1)
MISUSES = {
    "step after is_last=False": ([MORE, STEP], r"TrainStep\.step .*is_last=True"),
    "clip after is_last=False": ([MORE, CLIP_NORM], r"TrainStep\.clip_grad_norm .*is_last=True"),
    "mixed": ([MORE, COUNTED], "is_last for some micro-batches .* for each of them, or for none"),
    "mixed the other way": ([COUNTED, STEP, LAST], "is_last for some micro-batches .* for each of them, or for none"),
    "backward after the last": ([LAST, LAST], r"TrainStep\.backward .* Call step\(\)"),
    "update alone": ([LAST, UPDATE], r"TrainStep\.update .*clip_grad_norm\(\)"),
    "update of another optimizer": ([LAST, CLIP_NORM, call("update", [OTHER])], "not one of this TrainStep"),
    "clip twice": ([LAST, CLIP_NORM, CLIP_NORM], r"TrainStep\.clip_grad_norm .*twice.*update\(\)"),
    "backward before update": ([LAST, CLIP_NORM, LAST], r"TrainStep\.backward .*update\(\)"),
    "state inside": (
        [MORE, call("state_dict")],
        r"TrainStep\.state_dict was called after 1 micro-batch.* of an optimizer step.* between two",
    ),
    "loading inside": (
        [MORE, call("load_state_dict", {})],
        r"TrainStep\.load_state_dict was called after 1 micro-batch",
    ),
    "no_sync after a counted one": ([COUNTED, STEP, inside_no_sync(COUNTED)], "is_last for some"),
    "the last one inside no_sync": ([inside_no_sync(LAST)], r"is_last=True.* no_sync\(\)"),
    "step inside no_sync": ([inside_no_sync(COUNTED, STEP)], "before the last micro-batch"),
    "step without a last one": ([inside_no_sync(COUNTED), STEP], "before the last micro-batch"),
}


def _misuses():
    def run(calls):
        _call(SmallTraining(config(3, accumulation=2)), calls)

    return errors_of({name: partial(run, calls) for name, (calls, _) in MISUSES.items()})


def test_calls_in_the_wrong_order_are_named(ranks2):
    check_errors(ranks2.run(_misuses), {name: f"^StepError: .*{text}" for name, (_, text) in MISUSES.items()})


def _continued(stage, mesh_shape):
    """The norms and parameters where the last micro-batch is known, and where others are given as the last one, too."""
    found = []
    for marks in (((False, False, True),) * 2, ((True, False, True), (False, True, True))):
        training = SmallTraining(config(stage, comm="fp32"), mesh_shape=mesh_shape)
        norms = []
        for step, of_step in enumerate(marks):
            for micro, is_last in enumerate(of_step):
                loss = training.loss(3 * step + micro).float() / 3
                step_of(training.train).backward(loss, last=is_last, divide=False)
            norms.append(training.train.step().grad_norm)
        found.append((norms, training.parameters()))
    return found


@pytest.mark.parametrize(("stage", "mesh_shape"), [(1, None), (3, None), (2, (2, 2))])
def test_an_optimizer_step_goes_on_after_its_last_backward(request, stage, mesh_shape):
    ranks = request.getfixturevalue("ranks2" if mesh_shape is None else "ranks4")
    for (norms, known), (own_norms, continued) in ranks.run(_continued, stage, mesh_shape):
        if stage == 3:  # which reduces every micro-batch in any case
            assert (own_norms, same_bits(continued, known)) == (norms, [])
            continue
        # Micro-batches are added after the reduction, or before replicas are summed: in another order.
        assert own_norms == pytest.approx(norms, rel=1e-5)
        for name in known:
            torch.testing.assert_close(continued[name], known[name], rtol=1e-5, atol=1e-6)


def _continued_with_low_sums():
    training = SmallTraining(config(2, data_types={"grad_accum_dtype": "bf16"}))
    training.backward(is_last=True)
    with pytest.raises(zeroamp.StepError, match="data_types.grad_accum_dtype is bf16"):
        step_of(training.train).backward(training.loss(1), last=True)


def test_a_backward_after_the_last_one_is_refused_for_low_sums(ranks2):
    ranks2.run(_continued_with_low_sums)
