"""The one line about padding, long rings and all-to-alls between nodes."""

import torch
from torch import nn

import zeroamp
from tests.processes.training import config
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.mesh_notes import mesh_notes


def _plan(rows, columns=1024, stage=3, dtype="bfloat16", **zeroamp_keys):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    return zeroamp.build_plan(model, zeroamp.policy_from_config(config(stage, dtype=dtype, zeroamp=zeroamp_keys)))


def _notes(plan, num_shards, per_node=None, num_replicas=None):
    return mesh_notes(plan, Ranks(num_shards=num_shards, num_replicas=num_replicas), per_node)


def test_padding_from_five_percent_on():
    """Over 1,000 ranks 20,001 rows are 21,000, 4.99 % more, and 19,001 are 20,000, 5.3 % more."""
    assert _notes(_plan(20_001, 1025), 1000) is None
    assert "padding adds 5%" in _notes(_plan(19_001, 1200 + 1), 1000)
    assert _notes(_plan(1001, 1), 1000) is None, "a thousand elements are nothing"


def test_rings_of_more_than_1024_ranks():
    plan = _plan(16384)
    assert _notes(plan, 1024) is None
    assert "rings of 2,048 ranks" in _notes(plan, 2048)
    assert _notes(plan, 8, num_replicas=2048) is None, "replicas make no ring of shards"
    assert _notes(_plan(16384, stage=0), 2048) is None, "nothing is sharded at stage 0"


def test_all_to_alls_between_nodes_in_one_level():
    plan = _plan(1024)
    assert _notes(plan, 16, 8) is None, "two levels"
    assert "by all-to-alls in one level" in _notes(plan, 16, 6)
    assert "nodes of 6 ranks" in _notes(plan, 16, 6)
    assert _notes(plan, 16, None) is None, "not known"
    assert _notes(plan, 16, 1) is None, "a rank has no neighbours on its node"
    assert _notes(plan, 6, 6, num_replicas=16) is None
    assert _notes(_plan(1024, reduce_accumulate_dtype="native"), 16, 6) is None
    assert "by all-to-alls in one level" in _notes(_plan(1024, dtype=None), 16, 6), "fp32 gradients are summed alike"
    line = mesh_notes(plan, Ranks(num_shards=16), 8, "nodes have different numbers of ranks")
    assert "because nodes have different numbers of ranks" in line


def test_two_levels_have_short_rings():
    plan = _plan(16384)
    assert _notes(plan, 2048, 8) is None
    assert "rings of 2,048 ranks" in _notes(plan, 2048, 6)


def test_all_that_is_true_is_one_line():
    line = _notes(_plan(20_000, 1025), 16384, 6)
    assert "\n" not in line
    assert [words in line for words in ("padding adds 64%", "rings of 16,384", "between nodes", "zeroamp plan")] == [
        True
    ] * 4
