"""`explain` of all parts is one ledger of the whole model, on every rank: its rows are those without a pipeline."""

import json
import re
from functools import partial

import pytest
import torch

import zeroamp
from tests.models import pipelines as models
from tests.processes import pipelines
from tests.processes.parallel_training import mesh_of
from tests.zeroamp.pipelines.comparison import DATA, LR, config
from zeroamp.ledger.rows import DTYPE_COLUMNS, PER_RANK

PER_PARAMETER = ("class", "elements", *DTYPE_COLUMNS, *PER_RANK)


def _ledger(name, mode):
    """The ledger of all parts, and the names that this rank's parameters have."""
    _, parts, _ = pipelines.start(name, config(2, mode), DATA)
    named = [each for part in parts.values() for each in part.named_parameters()]
    train = zeroamp.PipelineStep(list(parts.values()), torch.optim.SGD([value for _, value in named], lr=LR))
    ledger = zeroamp.explain(train.model)
    with pytest.raises(zeroamp.WrapError, match="Ledger.verify got PipelineStep.model"):
        ledger.verify(train.model, torch.ones(1))
    texts = str(ledger), ledger.summary(), ledger.per_parameter(), repr(ledger)
    return texts, ledger.group_rows(), ledger.parameter_rows(), ledger.to_dict(), [fqn for fqn, _ in named]


def _whole(mode):
    mesh = mesh_of(stages=2, dp=2)
    policy = zeroamp.policy_from_config(config(2, mode), world_size=2)
    ledger = zeroamp.explain(zeroamp.wrap_model(models.decoder(), policy, mesh["dp"], auto_wrap_policy={"Block"}))
    return ledger.parameter_rows(), ledger.to_dict()


@pytest.mark.parametrize(("name", "mode"), [("1F1B", "bf16"), ("ZBVZeroBubble", "autocast")])
def test_the_ledger_of_all_parts_is_that_of_the_whole_model(ranks4, name, mode):
    found = ranks4.run(_ledger, name, mode)
    assert len({json.dumps(ledger[:-1]) for ledger in found}) == 1  # equal on all ranks
    (text, summary, long_text, in_short), groups, parameters, as_dict, _ = found[0]
    wanted, of_whole = ranks4.run(_whole, mode)[0]
    by_name = {row["parameter"]: {key: row[key] for key in PER_PARAMETER} for row in parameters}
    assert by_name == {row["parameter"]: {key: row[key] for key in PER_PARAMETER} for row in wanted}
    assert len(parameters) == len(wanted)
    assert as_dict["summary"] == of_whole["summary"]
    assert as_dict["low_share"] == of_whole["low_share"]
    assert sorted(as_dict["units"]) == sorted(of_whole["units"])
    assert {row["class"] for row in as_dict["classes"]} == {row["class"] for row in of_whole["classes"]}
    parts = {row["parameter"]: row["part"] for row in parameters}
    names = ["0", "1"] if name == "1F1B" else ["0.0", "0.1", "1.0", "1.1"]
    assert list(dict.fromkeys(row["part"] for row in groups)) == names
    for rank, (*_, fqns) in enumerate(found):
        assert {parts[fqn].partition(".")[0] for fqn in fqns} == {str(rank // 2)}
    assert f"{sum(row['elements'] for row in wanted):,} parameters" in " ".join(text.split())
    assert text.startswith(summary)
    assert "those of one micro-batch" in " ".join(text.split())
    assert "embed.weight" in long_text
    assert in_short.startswith(f"Ledger(mode {mode}")


def _failing(how):
    """The text of the error on this rank, if a rank of the second stage raises or makes another call."""
    _, parts, _ = pipelines.start("1F1B", config(2, "bf16"), DATA)
    (part,) = parts.values()
    train = zeroamp.PipelineStep(part, torch.optim.SGD(part.parameters(), lr=LR))
    call, is_other = partial(zeroamp.explain, train.model), torch.distributed.get_rank() == 2
    if is_other and how == "another call":
        call = partial(zeroamp.RunReport, train, "no folder")
    with pytest.MonkeyPatch.context() as patch:
        if is_other:
            patch.setattr("zeroamp.pipelines.ledger.ledger_rows", _raises)
        with pytest.raises(zeroamp.ZeroAmpError) as caught:
            call()
    return str(caught.value)


def _raises(*_):
    raise zeroamp.PrecisionError("planted")


@pytest.mark.parametrize(
    ("how", "text"),
    [("error", "^rank 2: planted"), ("another call", "^(explain|RunReport).* stopped, because the ranks are in diff")],
)
def test_an_error_of_one_stage_raises_on_all_ranks(ranks4, how, text):
    for found in ranks4.run(_failing, how):
        assert re.search(text, found), found
