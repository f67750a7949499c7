"""How the ranks of a mesh axis lie on nodes."""

import pytest

import zeroamp
from zeroamp.two_level.layout import nodes_of_axis
from zeroamp.wrapping.model_checks import ranks_per_node


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
def test_an_axis_has_two_levels_where_nodes_are_equal_blocks_of_a_power_of_two(ranks, per_node, expected):
    found = nodes_of_axis(list(ranks), per_node)
    assert (found.is_two_level, found.is_uneven) == expected


@pytest.mark.parametrize(("value", "expected"), [(None, 4), ("auto", 4), (2, 2), (1, 1), ("off", None)])
def test_ranks_per_node_comes_from_the_config_or_the_launcher(monkeypatch, value, expected):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = {} if value is None else {"zeroamp": {"ranks_per_node": value}}
    assert ranks_per_node(zeroamp.policy_from_config(config)) == expected
    for unset in (lambda: monkeypatch.setenv("LOCAL_WORLD_SIZE", ""), lambda: monkeypatch.delenv("LOCAL_WORLD_SIZE")):
        unset()
        assert ranks_per_node(zeroamp.policy_from_config(config)) == (None if value in (None, "auto") else expected)


@pytest.mark.parametrize("value", [0, -1, 2.5, "on", True])
def test_another_value_of_ranks_per_node_is_an_error(value):
    with pytest.raises(zeroamp.ConfigError, match="ranks_per_node"):
        zeroamp.policy_from_config({"zeroamp": {"ranks_per_node": value}})
