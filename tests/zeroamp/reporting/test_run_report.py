"""`RunReport`: what it writes is what happened, and training has the same bits with it."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.measuring.logs import log_lines
from tests.models.small import batch, loss_of
from tests.processes.ranks import RankError
from tests.processes.training import config, full_parameters, same_bits, wrapped
from tests.zeroamp.reporting.runs import NAME, take_steps, train_step
from zeroamp.hooks._torch.fsdp import communication_methods
from zeroamp.policies.numbers import size_text
from zeroamp.reporting.run_report import RunReport, count_tokens
from zeroamp.training.step import step_of


def _with_everything(cfg, folder):
    """Losses, norms and parameters of four steps, without instruments and with all."""
    results = []
    for has_instruments in (False, True):
        train = train_step(cfg)
        if has_instruments:
            with (
                zeroamp.RunReport(train, f"{folder}/run.jsonl"),
                zeroamp.Profile(train, f"{folder}/traces", wait=0, active=1),
            ):
                reports = take_steps(train, 4)
        else:
            reports = take_steps(train, 4)
        results.append(([r.loss for r in reports], [r.grad_norm for r in reports], full_parameters(train.model)))
    (losses, norms, parameters), (their_losses, their_norms, their_parameters) = results
    return losses == their_losses, norms == their_norms, same_bits(parameters, their_parameters)


def test_training_has_the_same_bits_with_every_instrument(ranks2, tmp_path):
    cfg = config(3, accumulation=2, clip=0.5)
    assert ranks2.run(_with_everything, cfg, str(tmp_path)) == [(True, True, [])] * 2


def _recorded(path):
    """What the report of a run has beside what `step()` returned."""
    train = train_step(CFG)
    rows = []
    with zeroamp.RunReport(train, path) as run:
        for _ in range(3):
            zeroamp.traffic(train.model).reset()
            rates = [group["lr"] for group in train.optimizers[0].param_groups]
            (report,) = take_steps(train, 1, first=len(rows))
            traffic = zeroamp.traffic(train.model).by_dtype()
            row = {"step": report.step, "loss": report.loss, "grad_norm": report.grad_norm, "lr": rates}
            rows.append(row | {"traffic_bytes": {f"{c} {SHORT[dtype]}": n for (c, dtype), (_, n) in traffic.items()}})
            assert run.last.step == len(rows)
    return rows


CFG = config(3, accumulation=2)
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def test_the_file_has_what_step_returned_and_what_the_counters_counted(ranks2, tmp_path):
    path = tmp_path / "new" / "run.jsonl"
    rows, _ = ranks2.run(_recorded, str(path))
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [{key: line[key] for key in row} for line, row in zip(lines, rows, strict=True)] == rows
    assert [line["lr"] for line in lines] == [[1e-2], [5e-3], [2.5e-3]]
    num_tokens = batch(NAME, 0).numel() * 2 * 2  # micro-batches, ranks
    for line in lines:
        assert line["num_tokens"] == num_tokens
        assert line["tokens_per_s"] == num_tokens / line["step_s"]
        parts = [line[f"{part}_s"] for part in ("forward", "backward", "exposed_communication", "optimizer")]
        assert all(part > 0 for part in parts)
        assert sum(parts) <= line["step_s"]
        assert line["peak_active_gib"] is None
        assert line["peak_rss_gib"] > 0
    assert header["kind"] == "header"
    assert header["world_size"] == 2
    assert header["plan"]["stage"] == 3
    assert header["optimizers"]["0"]["type"] == "AdamW"
    assert float(header["optimizers"]["0"]["betas.1"]) == 0.999
    assert header["versions"]["torch"] == torch.__version__
    policies = [zeroamp.policy_from_config(cfg, world_size=2) for cfg in (header["config"], CFG)]
    assert policies[0] == policies[1]


def _resumed(folder):
    """Two steps, a save, two steps that are lost in a crash, and three from the save on."""
    path = f"{folder}/run.jsonl"
    train = train_step(config(3))
    run = zeroamp.RunReport(train, path)
    take_steps(train, 2)
    zeroamp.save_checkpoint(folder, train.model, train)
    lost = take_steps(train, 2, first=7)
    run.close()
    if dist.get_rank() == 0:
        with open(path, "a") as file:
            file.write('{"kind": "step", "step": 5, "lo')
    train = train_step(config(3))
    with zeroamp.RunReport(train, path):
        zeroamp.load_checkpoint(folder, train.model, train)
        again = take_steps(train, 3, first=2)
    return [report.loss for report in lost], [report.loss for report in again]


def test_a_run_that_goes_on_replaces_the_steps_it_lost(ranks2, tmp_path):
    """A run that is gone on with appends and its steps replace those it lost."""
    lost, again = ranks2.run(_resumed, str(tmp_path))[0]
    with log_lines() as lines:
        run = zeroamp.read_run(tmp_path / "run.jsonl")
    assert [record.step for record in run.records] == [1, 2, 3, 4, 5]
    assert [record.loss for record in run.records[2:]] == again
    assert lost != again[:2]
    assert len(run.headers) == 2
    assert lines == [f"{tmp_path / 'run.jsonl'}, from line 6: 1 line is skipped: cut, or not written by RunReport"]
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 4 + 1 + 1 + 1 + 3


def _into_a_file_as_folder(path):
    zeroamp.RunReport(train_step(config(3)), path)


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(ranks2, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(RankError) as caught:
        ranks2.run(_into_a_file_as_folder, str(tmp_path / "taken" / "run.jsonl"))
    assert str(caught.value).count("ConfigError: rank 0: RunReport(path=)") == 2


def _around_other_forwards(path):
    """An evaluation, a verification and a window that failed are not counted as training; nothing is left behind."""
    train = train_step(config(3, accumulation=2))
    with zeroamp.RunReport(train, path) as run:
        take_steps(train, 1)
        num_tokens, traffic = run.last.num_tokens, run.last.traffic_bytes
        zeroamp.explain(train.model).verify(train.model, batch(NAME, 0))
        take_steps(train, 1)
        assert (run.last.num_tokens, run.last.traffic_bytes) == (num_tokens, traffic)
        with torch.no_grad():
            loss_of(train.model, batch(NAME, 0))
        take_steps(train, 1)
        assert run.last.num_tokens == num_tokens
        assert sum(run.last.traffic_bytes.values()) > sum(traffic.values())
        train.backward(loss_of(train.model, batch(NAME, 0)))
        train.step()
        train.zero_grad()
        take_steps(train, 1)
        assert run.last.num_tokens == num_tokens
    run.close()
    state = step_of(train).state
    assert not any(isinstance(each, RunReport) for each in (*train.callbacks, *state.listeners))
    assert "unshard" not in vars(next(communication_methods(state.root))[0])


def test_only_training_is_counted_and_close_leaves_nothing_behind(ranks2, tmp_path):
    ranks2.run(_around_other_forwards, str(tmp_path / "run.jsonl"))


def _on_a_full_disk():
    """/dev/full opens, and no write to it succeeds."""
    train = train_step(config(3))
    with log_lines() as lines, zeroamp.RunReport(train, "/dev/full") as run:
        take_steps(train, 2)
    return run.last.step, [line for line in lines if "RunReport" in line]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_line_that_cannot_be_written_ends_the_file(ranks2):
    """A line that cannot be written ends the file and not the training."""
    (last, lines), others = ranks2.run(_on_a_full_disk)
    assert [line.partition(", because")[0] for line in lines] == ["RunReport writes nothing more to /dev/full"]
    assert (last, others) == (2, (2, []))


def _summaries():
    with log_lines(20) as lines:
        model = wrapped("llama_untied", config(3))
    return [line for line in lines if line.startswith("wrapped")], sum(p.numel() for p in model.parameters())


def test_wrap_model_logs_its_size_on_the_first_rank(ranks2):
    (lines, numel), (others, _) = ranks2.run(_summaries)
    (text,) = lines
    assert others == []
    assert text.startswith("wrapped Llama in ")
    shards = f"2 shards of {size_text(numel * 4 // 2)}"
    assert f"mode autocast, ZeRO stage 3, {shards}, {numel:,} parameters, 3 FSDP units below the root, " in text
    assert text.endswith("% of the trainable elements in bf16")
    assert "\n" not in text


def _pending(path):
    """On an accelerator a record comes one step late: here on the CPU, as if it were one."""
    train = train_step(config(3))
    run = zeroamp.RunReport(train, path)
    run._is_read_late = True
    seen = []
    for index in range(3):
        (report,) = take_steps(train, 1, first=index)
        seen.append((report.loss, run.last and run.last.loss))
    run.close()
    return seen, run.last.loss


def test_late_records_are_those_of_the_step_before(ranks2, tmp_path):
    """Late records are those of the step before and close writes the last."""
    seen, last = ranks2.run(_pending, str(tmp_path / "run.jsonl"))[0]
    losses = [loss for loss, _ in seen]
    assert [late for _, late in seen] == [None, *losses[:2]]
    assert last == losses[2]
    assert [record.loss for record in zeroamp.read_run(tmp_path / "run.jsonl").records] == losses


def _one_at_a_time(folder):
    """What the second of two reports is answered, and what the ones after the first have."""
    train = train_step(config(3))
    run = zeroamp.RunReport(train, f"{folder}/a.jsonl", tokens_per_step=7)
    other = zeroamp.TrainStep(train.model, torch.optim.SGD(train.model.parameters(), lr=1e-2))
    with pytest.raises(zeroamp.StepError) as refused:
        zeroamp.RunReport(other, f"{folder}/b.jsonl")
    take_steps(train, 1)
    run.close()
    with zeroamp.RunReport(train, f"{folder}/b.jsonl") as second:
        run.close()  # again, which ends no other
        take_steps(train, 1)
    take_steps(train, 1)
    return str(refused.value), (run.last.step, run.last.num_tokens), (second.last.step, second.last.num_tokens)


def test_a_model_has_one_report_at_a_time(ranks2, tmp_path):
    num_tokens = batch(NAME, 0).numel() * 2
    for text, first, second in ranks2.run(_one_at_a_time, str(tmp_path)):
        assert "Another RunReport is open on this model" in text
        assert (first, second) == ((1, 7), (2, num_tokens))
    assert [record.step for record in zeroamp.read_run(tmp_path / "a.jsonl").records] == [1]


def _inside_a_step(path):
    """Begin a report at every moment of a step of two micro-batches, and after a step that was discarded."""
    train = train_step(config(3, accumulation=2))
    zeroamp.RunReport(train, path).close()
    for act in (lambda: train.backward(loss_of(train.model, batch(NAME, 0))), train.step):
        act()
        with pytest.raises(zeroamp.StepError, match=r"Construct it after step\(\)"):
            zeroamp.RunReport(train, path)
    train.zero_grad()
    zeroamp.RunReport(train, path).close()
    take_steps(train, 1)
    zeroamp.RunReport(train, path).close()


def test_a_report_that_would_begin_inside_an_optimizer_step_is_refused(ranks2, tmp_path):
    ranks2.run(_inside_a_step, str(tmp_path / "run.jsonl"))


def ids(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)


@dataclass
class Batch:
    labels: torch.Tensor


@pytest.mark.parametrize(
    ("args", "kwargs", "num_tokens"),
    [
        ((), {"position_ids": ids(3, 64), "input_ids": ids(64)}, 64),
        (({"labels": ids(2, 3)},), {}, 6),
        ((Batch(ids(2, 3)),), {}, 6),
        ((), {"input_ids": None, "labels": ids(2, 3)}, 6),
        ((ids(4), torch.zeros(4, 4), ids(2, 3, dtype=torch.int32), ids(9, 9)), {}, 6),
        ((ids(4), torch.zeros(4, 4)), {"mask": ids(4, 4, dtype=torch.bool)}, None),
    ],
)
def test_tokens_are_the_elements_of_input_ids(args, kwargs, num_tokens):
    """Tokens are the elements of input_ids else of the first integers of two dims."""
    assert count_tokens(args, kwargs) == num_tokens
