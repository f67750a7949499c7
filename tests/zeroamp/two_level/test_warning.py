"""`wrap_model` warns of nodes that do not allow reductions in two levels."""

import torch
from torch import nn

import zeroamp
from benchmarks.fake_ranks import fake_ranks
from tests.measuring.logs import log_lines
from tests.processes.training import config


def _warnings(num_ranks, **options):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with fake_ranks(num_ranks), log_lines() as lines:
        zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3, **options)), materialize=False)
    return [line for line in lines if "in one level" in line]


def test_a_mesh_over_uneven_nodes_is_warned_of_in_one_line_and_an_even_one_is_not(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    (line,) = _warnings(16)
    assert "do not lie on nodes of 6" in line
    assert _warnings(6) == []
    assert _warnings(16, zeroamp={"ranks_per_node": "off"}) == []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert _warnings(16) == []
    assert _warnings(16, zeroamp={"dp_replicate_size": 2}) == []
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert _warnings(16) == [], "the nodes are not known"
