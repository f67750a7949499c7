"""Reports, counters and traces of a `PipelineStep` have all parts of a rank, and not only the first one."""

import logging
from collections import Counter

import pytest
import torch
from torch import nn

import zeroamp
from tests.models import pipelines as models
from tests.processes import pipelines
from tests.zeroamp.pipelines.comparison import DATA, LR, config
from zeroamp.policies.dtypes import short_name


def _start(name, axes=DATA, **options):
    """Return what runs one optimizer step, the parts, and their `PipelineStep`."""
    made = []

    def loss_fn(parts):
        parameters = [parameter for part in parts.values() for parameter in part.parameters()]
        made.append(zeroamp.PipelineStep(list(parts.values()), torch.optim.SGD(parameters, lr=LR)))
        return made[0].wrap_loss(models.loss_of)

    mesh, parts, schedule = pipelines.start(name, config(3, "bf16"), axes, loss_fn=loss_fn, **options)

    def step(number, between=lambda: None):
        pipelines.run_step(schedule, name, parts, mesh, number)
        between()
        return made[0].step()

    return step, list(parts.values()), made[0]


def _by_dtype(model):
    """(collective, dtype) -> bytes."""
    return Counter({key: num_bytes for key, (_, num_bytes) in zeroamp.traffic(model).by_dtype().items()})


def _counted(name, folder):
    """Of two steps: the bytes of each part, those of all parts, and the report's. Then labels of a trace."""
    step, parts, train = _start(name)
    seen = []
    with zeroamp.RunReport(train, f"{folder}/run.jsonl") as run:
        for number in range(2):
            for model in (*parts, train.model):
                zeroamp.traffic(model).reset()
            step(number)
            seen.append(([_by_dtype(part) for part in parts], _by_dtype(train.model), run.last))
        with zeroamp.Profile(train, folder, wait=0, active=1) as profile:
            step(2)
            step(3)
    return seen, {row["label"]: row["calls"] for row in profile.times}


def test_reports_and_counters_have_all_parts_of_a_rank(ranks4, tmp_path):
    """Beside those of the parts there is one collective, that of the optimizer step."""
    name = "Interleaved1F1B"
    for seen, labels in ranks4.run(_counted, name, str(tmp_path)):
        for of_parts, of_all, record in seen:
            assert len(of_parts) == 2
            assert all(of_part["all_gather", torch.bfloat16] > 0 for of_part in of_parts)
            assert (of_all - sum(of_parts, Counter())).keys() == {("all_reduce", torch.float64)}
            assert not sum(of_parts, Counter()) - of_all
            assert record.traffic_bytes == {f"{c} {short_name(dtype)}": num for (c, dtype), num in of_all.items()}
            assert record.forward_s > 0
            assert record.num_tokens is None
        of_units = {label: calls for label, calls in labels.items() if label.startswith("zeroamp::forward")}
        num_calls = pipelines.num_micro_batches(name)
        assert set(of_units.values()) == {num_calls}
        assert {"zeroamp::forward (0)", "zeroamp::forward (1)"} < of_units.keys()
        assert sum("blocks" in label for label in of_units) == models.NUM_BLOCKS // 2


def _begun(path):
    """The text of the error of a report that is made after the schedule. Then the bytes that the next step's has."""
    step, _, train = _start("1F1B", {"pp": 2, "dp": 1})
    texts = []

    def between():
        with pytest.raises(zeroamp.StepError) as caught:
            zeroamp.RunReport(train, path)
        texts.append(str(caught.value))

    step(0, between)
    with zeroamp.RunReport(train, path) as run:
        step(1)
    return texts[0], run.last.communicated_bytes


def test_a_report_between_schedule_and_step_is_refused(ranks2, tmp_path):
    """It would have no bytes of the backwards that have run."""
    for text, num_bytes in ranks2.run(_begun, str(tmp_path / "run.jsonl")):
        assert "must be constructed between two optimizer steps" in text
        assert num_bytes > 0


def _observed():
    """The counters of all parts, before and after one part was verified."""
    _, parts, train = _start("Interleaved1F1B")
    before = _by_dtype(train.model)
    inputs = torch.zeros(1, 5, dtype=torch.int64) if parts[0].embed is not None else torch.ones(1, 5, models.WIDTH)
    zeroamp.explain(parts[0]).verify(parts[0], inputs, loss_fn=lambda output: output.float().sum())
    return before, _by_dtype(train.model)


def test_a_step_that_verify_runs_is_not_counted(ranks4):
    for before, after in ranks4.run(_observed):
        assert before == after


def _logged():
    """The log of two steps of a rank whose last part has a layer that is not used."""

    def edit(parts, _mesh):
        parts[max(parts)].spare = nn.Linear(2, 2)

    step, _, _ = _start("Interleaved1F1B", {"pp": 2, "dp": 1}, edit=edit)
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("zeroamp").addHandler(handler)
    try:
        for number in range(2):
            step(number)
    finally:
        logging.getLogger("zeroamp").removeHandler(handler)
    return [text for text in texts if "had no gradient" in text]


def test_parameters_without_a_gradient_are_logged_once_per_stage(ranks2):
    for texts in ranks2.run(_logged):
        (text,) = texts
        assert "2 trainable parameters had no gradient on any rank in an optimizer step: spare.weight, spare.b" in text
