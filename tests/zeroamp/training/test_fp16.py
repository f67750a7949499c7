"""float16: loss scaling, skipped steps, and agreement of the ranks."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, loss_of
from tests.oracles import one_process
from tests.processes.ranks import RankError
from tests.processes.training import check_run, config, full_parameters, same_bits, train, wrapped
from tests.selection import slow_but

NAME = "llama_tied"
FIXED = {"fp16": {"loss_scale": 1024}}


def _train_all_stages(cfg_options, num_steps):
    return {stage: train(NAME, config(stage, clip=0.5, **cfg_options), num_steps) for stage in (0, 1, 2, 3)}


@pytest.mark.parametrize("mode", ["autocast", "fp16"])
def test_all_stages_equal_one_process_with_the_same_scale(ranks2, mode):
    if mode == "autocast":
        options, oracle = {"dtype": "float16", **FIXED}, {"autocast": torch.float16}
    else:
        options = {"dtype": None, "fp16": {"enabled": True, "loss_scale": 1024}}
        oracle = {"autocast": None, "low_model": torch.float16}
    expected = one_process.train(NAME, world_size=2, num_steps=6, clip=0.5, loss_scale=1024.0, **oracle)
    for rank, by_stage in enumerate(ranks2.run(_train_all_stages, options, 6)):
        for run in by_stage.values():
            check_run(run, rank, expected)


def _run(cfg, num_steps, overflow_at=(), num_groups=1, skip_at=(), name=NAME):
    """Train; on rank 1, make the loss overflow at some steps. Return what each step did."""
    model = wrapped(name, cfg)
    parameters = list(model.parameters())
    groups = [{"params": parameters[index::num_groups]} for index in range(num_groups)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    step = zeroamp.TrainStep(model, optimizer, scheduler)
    rows = []
    for index in range(num_steps):
        if index in skip_at:
            continue
        before = full_parameters(model)
        loss = loss_of(model, batch(name, 2 * (index % 4) + dist.get_rank(), size=8))
        step.backward(loss * (1e30 if index in overflow_at and dist.get_rank() == 1 else 1.0))
        report = step.step()
        rows.append(
            {
                "loss": report.loss,
                "norm": report.grad_norm,
                "scale": report.loss_scale,
                "skipped": report.skipped,
                "step": report.step,
                "schedule": scheduler.last_epoch,
                "changed": same_bits(full_parameters(model), before) != [],
            }
        )
    return rows


def dynamic(stage, **fields):
    return config(stage, dtype="float16", clip=1.0, fp16={"initial_scale_power": 10, **fields})


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_one_rank_overflows_and_all_ranks_skip_and_lower_the_scale(ranks2, stage):
    by_rank = ranks2.run(_run, dynamic(stage, hysteresis=1), 4, (1, 2))
    for rows in by_rank:
        assert [row["scale"] for row in rows] == [1024.0, 1024.0, 512.0, 256.0]
        assert [row["skipped"] for row in rows] == [False, True, True, False]
        assert [row["changed"] for row in rows] == [True, False, False, True]
        assert [row["step"] for row in rows] == [1, 1, 1, 2]
        assert [row["schedule"] for row in rows] == [1, 1, 1, 2]
        assert not torch.isfinite(torch.tensor(rows[1]["norm"]))


def test_hysteresis_holds_the_scale_for_one_overflow(ranks2):
    rows = ranks2.run(_run, dynamic(3), 4, (1, 2))[0]
    assert [row["scale"] for row in rows] == [1024.0, 1024.0, 1024.0, 512.0]


def test_one_update_per_step_whatever_the_number_of_parameter_groups(ranks2):
    one, three = (ranks2.run(_run, dynamic(2, loss_scale_window=2), 6, (), groups)[0] for groups in (1, 3))
    assert [row["scale"] for row in three] == [1024.0, 1024.0, 1024.0, 2048.0, 2048.0, 4096.0]
    assert [row["scale"] for row in one] == [row["scale"] for row in three]


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_at_the_minimum_scale_is_an_error_on_all_ranks(ranks2, stage):
    cfg = dynamic(stage, hysteresis=1, min_loss_scale=512)
    text = r"StepError: .* loss scale 512, .*fp16.min_loss_scale 512.* after 1 optimizer steps.* norms .* Lower"
    with pytest.raises(RankError, match=text) as caught:
        ranks2.run(_run, cfg, 4, (1, 2))
    assert "--- rank 1" in str(caught.value)


def test_a_fixed_scale_skips_but_does_not_move(ranks2):
    cfg = config(3, dtype="float16", fp16={"loss_scale": 256})
    rows = ranks2.run(_run, cfg, 3, (1,))[0]
    assert [(row["scale"], row["skipped"]) for row in rows] == [(256.0, False), (256.0, True), (256.0, False)]


@pytest.mark.slow
def test_float16_autocast_trains_like_bfloat16_autocast_through_an_overflow(ranks2):
    # The untied model starts at the loss of a uniform guess; the tied one, whose logits are large, far above.
    half = ranks2.run(_run, dynamic(3, hysteresis=1), 50, (20,), 1, (), "llama_untied")[0]
    brain = ranks2.run(_run, config(3, clip=1.0), 50, (), 1, (20,), "llama_untied")[0]  # the same batch left out
    del half[20]
    assert half[-1]["loss"] < 0.9 * half[0]["loss"]
    ours, theirs = (torch.tensor([row["loss"] for row in rows]) for rows in (half, brain))
    # Both compute in 16 bits, with 11 and 8 significant ones; averaged over 352 tokens little of that is left.
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)


def _plain_backward():
    model = wrapped(NAME, config(3, dtype="float16"))
    loss_of(model, batch(NAME, 0)).backward()


def test_a_plain_backward_is_refused(ranks2):
    with pytest.raises(RankError, match="StepError: loss.backward.* float16, which scales the loss"):
        ranks2.run(_plain_backward)


def _resume():
    cfg = dynamic(2, hysteresis=2, loss_scale_window=3)

    def fresh():
        model = wrapped(NAME, cfg)
        return model, zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def advance(model, step, marks):
        scales = []
        for mark in marks:
            step.backward(loss_of(model, batch(NAME, 0)) * (1e30 if mark == "x" else 1.0))
            scales.append(step.step().loss_scale)
        return scales

    model, step = fresh()
    whole = advance(model, step, ".x.xx......")
    model, step = fresh()
    first = advance(model, step, ".x.xx")
    saved = step.state_dict()
    model, step = fresh()
    step.load_state_dict(saved)
    return whole, first + advance(model, step, "......"), saved


def test_the_scale_and_its_counters_survive_a_state_dict(ranks2):
    whole, resumed, saved = ranks2.run(_resume)[0]
    assert resumed == whole
    assert len(set(whole)) > 2  # it moved down and up
    assert saved["num_steps"] == 2


def _state_dict_in_a_window(method):
    model = wrapped(NAME, config(2, accumulation=2))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    saved = step.state_dict()
    step.backward(loss_of(model, batch(NAME, 0)))
    step.step()
    return step.state_dict() if method == "state_dict" else step.load_state_dict(saved)


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_a_state_dict_inside_a_window_is_refused(ranks2, method):
    with pytest.raises(
        RankError, match=f"TrainStep.{method} was called after 1 micro-batch.* of an optimizer step.* between two"
    ):
        ranks2.run(_state_dict_in_a_window, method)


def _load_into(cfg, saved_cfg):
    steps = []
    for each in (saved_cfg, cfg):
        model = wrapped(NAME, each)
        steps.append(zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    saved = steps[0].state_dict()
    without_scale = {key: value for key, value in saved.items() if key != "loss_scale"}
    steps[1].load_state_dict(without_scale)
    steps[1].load_state_dict(saved)


@pytest.mark.parametrize(
    ("cfg", "saved_cfg", "text"),
    [
        (
            config(3, dtype="float16", **FIXED),
            dynamic(3),
            "(?=.*a fixed scale at 1024)(?=.*a dynamic scale at 1024)",
        ),
        (dynamic(3), config(3), "(?=.*a dynamic scale)(?=.*a switched-off scale at 1)"),
        (
            config(3, dtype="float16", **FIXED),
            config(3, dtype="float16", fp16={"loss_scale": 2}),
            "(?=.*a fixed scale at 1024)(?=.*a fixed scale at 2)",
        ),
    ],
    ids=["dynamic into fixed", "bf16 into dynamic", "another fixed one"],
)
def test_the_state_of_another_loss_scale_is_refused(ranks2, cfg, saved_cfg, text):
    with pytest.raises(RankError, match=f"StepError: loss_scale in TrainStep.load_state_dict{text}"):
        ranks2.run(_load_into, cfg, saved_cfg)


def _overflow_in_a_window(stage, accumulate, bad):
    cfg = config(stage, dtype="float16", clip=1.0, accumulation=2, data_types={"grad_accum_dtype": accumulate})
    cfg["fp16"] = {"initial_scale_power": 10, "hysteresis": 1}
    model = wrapped(NAME, cfg)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    reports = []
    for window in range(2):
        for micro in range(2):
            factor = bad if (window, micro, dist.get_rank()) == (0, 0, 1) else 1.0
            step.backward(loss_of(model, batch(NAME, micro)) * factor)
            report = step.step()
        reports.append((report.skipped, report.loss_scale))
    return reports


@pytest.mark.parametrize("bad", slow_but([1e30, float("nan")], 1e30))
@pytest.mark.parametrize("accumulate", slow_but(["fp32", "bf16", "fp16"], "fp32", "fp16"))
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_one_bad_micro_batch_of_one_rank_skips_the_window(ranks2, stage, accumulate, bad):
    for reports in ranks2.run(_overflow_in_a_window, stage, accumulate, bad):
        assert reports == [(True, 1024.0), (False, 512.0)]
