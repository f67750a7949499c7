"""`PipelineStep` drives the optimizer steps of parts: norms, losses and weights of one process, also in float16."""

import statistics
from itertools import chain

import pytest
import torch

import zeroamp
from tests.models import pipelines as models
from tests.processes import pipelines
from tests.processes.parallel_training import mesh_of
from tests.zeroamp.pipelines.comparison import BOUND, DATA, LR, STEPS, check, config, expected, needs
from zeroamp.training.step import step_of

SCALE = 2.0**10


@pytest.mark.parametrize(
    ("name", "stage", "mode"),
    [("1F1B", 2, "bf16"), ("ZBVZeroBubble", 3, "bf16"), ("Interleaved1F1B", 0, "autocast"), ("1F1B", 3, "fp16")],
)
def test_steps_train_as_one_process(ranks4, name, stage, mode):
    """In float16 the schedule's losses are scaled, by a power of two. Reports have the mean of the unscaled ones.

    A rank adds its losses in fp32, the expected mean is in fp64: 1e-6.
    """
    needs(name)
    cfg, scale = config(stage, mode, gradient_clipping=1.0), SCALE if mode == "fp16" else 1.0
    found = ranks4.run(pipelines.train_by_steps, name, cfg, DATA, STEPS, lr=LR)
    wanted = expected(name, mode, loss_scale=scale)
    means = [statistics.fmean(chain.from_iterable(of_ranks)) for of_ranks in wanted.losses]
    for run, reports in found:
        run.losses[:] = [[loss / scale for loss in of_step] for of_step in run.losses]
        assert [report.loss for report in reports] == pytest.approx(means, rel=1e-6)
        assert [report.scale for report in reports] == [scale] * STEPS
    check([run for run, _ in found], wanted, DATA["dp"], BOUND[mode])


def test_an_overflow_skips_the_step_on_all_stages(ranks4):
    cfg = {"fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}, "zero_optimization": {"stage": 2}}
    found = ranks4.run(pipelines.train_by_steps, "1F1B", cfg, DATA, 2, lr=LR)
    whole = dict(models.decoder().named_parameters())
    for run, reports in found:
        assert [(report.skipped, report.scale) for report in reports] == [(True, 2.0**32), (True, 2.0**31)]
        assert all(torch.equal(value, whole[fqn]) for fqn, value in run.parameters.items())


def _mistake(name):
    """The text of the error of a mistake on this rank.

    A schedule that raises on one rank lets others wait for it. So two rows do what it does before each backward.
    """
    mode = "fp16" if name == "loss not wrapped" else "bf16"
    mesh, parts, schedule = pipelines.start("1F1B", config(2, mode, gradient_clipping=1.0), DATA)
    held = list(parts.values())
    optimizer = torch.optim.SGD(held[0].parameters(), lr=LR)
    if name == "no PipelineStep":
        of_stage = torch.zeros(1, 5, dtype=torch.int64) if 0 in parts else torch.ones(1, 5, models.WIDTH)
        return _text(held[0](of_stage).sum().backward)
    if name == "a part twice":
        return _text(zeroamp.PipelineStep, held * 2, optimizer)
    if name == "other policies":
        held.append(zeroamp.wrap_model(torch.nn.Linear(2, 2), config(2, mode), mesh["dp"]))
        return _text(zeroamp.PipelineStep, held, optimizer)
    if name == "one stage's optimizer":
        other = torch.nn.Linear(2, 2) if 0 in parts else held[0]
        return _text(zeroamp.PipelineStep, held, torch.optim.SGD(other.parameters(), lr=LR))
    train = zeroamp.PipelineStep(held, optimizer)
    if name == "step without backward":
        return _text(train.step)
    if name == "backward":
        return _text(train.backward, torch.ones(()))
    pipelines.run_step(schedule, "1F1B", parts, mesh, 0)
    if name == "optimizer.step":
        return _text(optimizer.step)
    if name == "loss not wrapped":
        return _text(train.step)
    if name == "max_norm of one stage":
        return _text(train.clip_grad_norm, 1.0 + (0 in parts))
    train.clip_grad_norm()
    held[0].set_reshard_after_backward(False)
    return _text(held[0].set_requires_gradient_sync, False)


def _calls_with_all_parts():
    _, parts, _ = pipelines.start("Interleaved1F1B", config(2, "bf16"), DATA)
    held = list(parts.values())
    model = zeroamp.PipelineStep(held, torch.optim.SGD([p for part in held for p in part.parameters()])).model
    texts = {call.__name__: _text(call, model) for call in (zeroamp.unwrap_model, zeroamp.sleep)}
    return texts | {"load_hf": _text(zeroamp.load_hf, model, "no folder")}


def test_calls_for_one_part_refuse_all_parts_of_a_rank(ranks4):
    for texts in ranks4.run(_calls_with_all_parts):
        assert all(text.startswith(name) and "part" in text for name, text in texts.items())


def _text(call, *args):
    with pytest.raises(zeroamp.ZeroAmpError) as caught:
        call(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no PipelineStep", "gradient_clipping 1.0, which a schedule ignores. Build train = zeroamp.PipelineStep"),
        ("a part twice", "Two parts of this rank have a "),
        ("other policies", "parts that are wrapped with different policies"),
        ("one stage's optimizer", "is not one of the wrapped model's"),
        (
            "step without backward",
            "step found no gradient on any parameter of a part. Call it after schedule",
        ),
        ("backward", "the schedule runs the backwards of a pipeline"),
        ("optimizer.step", "which steps this optimizer itself"),
        ("loss not wrapped", "found no loss of wrap_loss on any rank"),
        ("max_norm of one stage", "max_norm is 2.0 on ranks 0, 1, but 1.0 on ranks 2, 3"),
        ("schedule.step before update", "schedule.step was called after"),
    ],
)
def test_mistakes_raise_on_all_ranks(ranks4, name, text):
    for found in ranks4.run(_mistake, name):
        assert text in found


def _behind_frozen_part():
    """A zero bubble schedule whose second part gets inputs without gradients: the text of the error on its rank."""

    def edit(parts, _mesh):
        if 0 in parts:
            parts[0].requires_grad_(False)

    made = []

    def loss_fn(parts):
        held = list(parts.values())
        made.append(zeroamp.PipelineStep(held, torch.optim.SGD([p for part in held for p in part.parameters()])))
        return made[0].wrap_loss(models.loss_of)

    axes, name = {"pp": 2, "dp": 1}, "InterleavedZeroBubble"
    mesh, parts, schedule = pipelines.start(name, config(2, "fp32"), axes, edit=edit, loss_fn=loss_fn)
    pipelines.run_step(schedule, name, parts, mesh, 0)
    return "" if 0 in parts else _text(step_of(made[0]).begin, "PipelineStep.step")


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.11 loses none")
def test_gradients_that_a_zero_bubble_schedule_loses_raise(ranks2):
    """The part after the frozen one is on another rank, which the first waits for in `step`. So only that one runs."""
    first, second = ranks2.run(_behind_frozen_part)
    assert first == ""
    assert "A zero bubble schedule of torch computes none" in second


def _dtypes_of_loss():
    """The dtype of a product inside of the loss function, and of the loss that the schedule gets."""
    _, parts, _ = pipelines.start("1F1B", config(2, "autocast"), {"pp": 2, "dp": 1})
    (part,) = parts.values()
    train, inside = zeroamp.PipelineStep(part, torch.optim.SGD(part.parameters())), []

    def loss_fn(output, weight):
        inside.append((output @ weight).dtype)
        return (output @ weight).sum()

    return inside, train.wrap_loss(loss_fn)(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_a_wrapped_loss_is_computed_under_autocast(ranks2):
    assert ranks2.run(_dtypes_of_loss) == [([torch.bfloat16], torch.float32)] * 2


def _unnamed_axis():
    mesh = mesh_of(stages=2, dp=1)
    index = mesh["stages"].get_local_rank()
    part = zeroamp.wrap_model(models.part(index, 2), {"bf16": {"enabled": True}}, mesh["dp"])
    train = zeroamp.PipelineStep(part, torch.optim.SGD(part.parameters()))
    if index == 1:
        train.wrap_loss(models.loss_of)
    part(torch.zeros(1, 5, dtype=torch.int64) if index == 0 else torch.ones(1, 5, models.WIDTH)).sum().backward()
    return _text(train.step)


def test_stages_on_an_axis_of_another_name_raise(ranks2):
    assert all('Name the axis of the stages "pp"' in text for text in ranks2.run(_unnamed_axis))
