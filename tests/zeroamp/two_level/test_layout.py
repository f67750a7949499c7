"""How the ranks of a mesh axis lie on nodes, and the warning where they allow no two levels."""

import os
import socket
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroamp
from benchmarks.fake_ranks import fake_ranks
from tests.measuring.logs import log_lines
from tests.processes.training import config
from zeroamp.two_level.layout import nodes_of_axis
from zeroamp.wrapping.model_checks import is_one_node, ranks_per_node
from zeroamp.wrapping.state import wrap_state


@pytest.mark.parametrize(
    ("ranks", "per_node", "expected"),
    [
        (range(8), 4, (True, False)),
        (range(8), 8, (False, False)),  # one node
        ([0, 4], 4, (False, False)),  # one rank on each node: flat is right
        ([0, 2, 4, 6], 4, (True, False)),  # replicas of two shards, two on each node
        (range(6), 3, (False, True)),  # 3 is no power of two
        (range(6), 4, (False, True)),  # 4 + 2
        ([0, 4, 1, 5], 4, (False, True)),  # not node by node
    ],
    ids=str,
)
def test_an_axis_has_two_levels_on_equal_nodes(ranks, per_node, expected):
    """An axis has two levels where nodes are equal blocks of a power of two."""
    found = nodes_of_axis(list(ranks), per_node)
    assert (found.is_two_level, found.is_uneven) == expected


@pytest.mark.parametrize(("value", "expected"), [(None, 4), ("auto", 4), (2, 2), (1, 1), ("off", None)])
def test_ranks_per_node_comes_from_the_config_or_the_launcher(monkeypatch, value, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cfg = {} if value is None else {"zeroamp": {"ranks_per_node": value}}
    assert ranks_per_node(zeroamp.policy_from_config(cfg)) == expected
    for unset in (lambda: monkeypatch.setenv("LOCAL_WORLD_SIZE", ""), lambda: monkeypatch.delenv("LOCAL_WORLD_SIZE")):
        unset()
        assert ranks_per_node(zeroamp.policy_from_config(cfg)) == (None if value in (None, "auto") else expected)


@pytest.mark.parametrize("value", [0, "on", True])
def test_another_value_of_ranks_per_node_is_an_error(value):
    with pytest.raises(zeroamp.ConfigError, match="ranks_per_node"):
        zeroamp.policy_from_config({"zeroamp": {"ranks_per_node": value}})


def _nodes_by(hosts, num_devices):
    """Return the ranks of this rank's node in a reduction, and why it has one level, without LOCAL_WORLD_SIZE."""
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    torch.manual_seed(0)
    with (
        mock.patch.object(torch.accelerator, "device_count", return_value=num_devices),
        mock.patch.object(socket, "gethostname", return_value=hosts[dist.get_rank()]),
    ):
        policy = zeroamp.policy_from_config({"zero_optimization": {"stage": 3}})
        nodes = wrap_state(zeroamp.wrap_model(torch.nn.Linear(8, 8), policy)).nodes
    return [dist.get_process_group_ranks(each.inside) for each in nodes.by_axis.values()], nodes.why_flat


@pytest.mark.parametrize(
    ("hosts", "num_devices", "inside", "why_flat"),
    [
        ("aabb", 2, [[0, 1], [2, 3]], None),
        ("aaaa", 2, None, None),  # several ranks on a GPU
        ("aaab", 2, None, "different numbers of ranks"),
        ("abab", 2, None, "not consecutive"),
        ("aabb", 4, None, None),  # this host has a GPU for each rank: its name is not asked for
    ],
)
def test_without_a_launchers_number_nodes_are_found_by_the_names_of_hosts(ranks4, hosts, num_devices, inside, why_flat):
    for rank, (found, why) in enumerate(ranks4.run(_nodes_by, hosts, num_devices)):
        assert found == ([] if inside is None else [inside[rank // 2]])
        assert (why is None) == (why_flat is None)
        assert (why_flat or "") in (why or "")


def _warnings(num_ranks, **options):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with fake_ranks(num_ranks), log_lines() as lines:
        zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3, **options)), materialize=False)
    return [line for line in lines if "in one level" in line]


def test_a_mesh_over_uneven_nodes_is_warned_of(monkeypatch):
    """A mesh over uneven nodes is warned of in one line and an even one is not."""
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


@pytest.mark.parametrize(("per_node", "expected"), [(3, False), (4, True), (5, True)])
def test_a_node_with_room_for_all_ranks_is_the_only_one(per_node, expected):
    policy = zeroamp.policy_from_config({"zeroamp": {"ranks_per_node": per_node}})
    with mock.patch.object(dist, "get_world_size", return_value=4):
        assert is_one_node(policy) is expected
