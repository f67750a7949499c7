"""The one line about padding, long rings and all-to-alls between hosts."""

import pytest
import torch
from torch import nn

import zeroamp
from tests.processes.training import config
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.mesh_notes import mesh_notes, ranks_of_host


def _plan(rows, columns=1024, stage=3, dtype="bfloat16", **zeroamp_keys):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    return zeroamp.build_plan(model, zeroamp.policy_from_config(config(stage, dtype=dtype, zeroamp=zeroamp_keys)))


def _notes(plan, num_shards, ranks_per_host=None, num_replicas=None):
    return mesh_notes(plan, Ranks(num_shards=num_shards, num_replicas=num_replicas), ranks_per_host)


def test_padding_from_five_percent_on():
    """Over 1,000 ranks 20,001 rows are 21,000, 4.99 % more, and 19,001 are 20,000, 5.3 % more."""
    assert _notes(_plan(20_001, 1025), 1000) is None
    assert "5% of padding" in _notes(_plan(19_001, 1200 + 1), 1000)
    assert _notes(_plan(1001, 1), 1000) is None, "a thousand elements are nothing"


def test_rings_of_more_than_1024_ranks():
    plan = _plan(16384)
    assert _notes(plan, 1024) is None
    assert "rings of 2,048 ranks" in _notes(plan, 2048)
    assert _notes(plan, 8, num_replicas=2048) is None, "replicas make no ring of shards"
    assert _notes(_plan(16384, stage=0), 2048) is None, "nothing is sharded at stage 0"


def test_all_to_alls_between_hosts():
    plan = _plan(1024)
    assert _notes(plan, 8, 8) is None
    assert "between hosts of 8 ranks by all-to-alls" in _notes(plan, 16, 8)
    assert _notes(plan, 16, None) is None, "not known"
    assert _notes(plan, 8, 8, num_replicas=16) is None
    assert _notes(_plan(1024, reduce_accumulate_dtype="native"), 16, 8) is None
    assert _notes(_plan(1024, dtype=None), 16, 8) is None, "fp32 is reduced by the backend"


def test_all_that_is_true_is_one_line():
    line = _notes(_plan(20_000, 1025), 16384, 8)
    assert "\n" not in line
    assert [words in line for words in ("64% of padding", "rings of 16,384", "between hosts", "zeroamp plan")] == [
        True
    ] * 4


@pytest.mark.parametrize(("text", "number"), [("8", 8), ("", None), ("0", None), ("many", None)])
def test_ranks_of_a_host_are_those_of_torchrun(monkeypatch, text, number):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert ranks_of_host() == number
