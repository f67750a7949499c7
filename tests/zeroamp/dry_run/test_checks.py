"""`plan_run` refuses numbers that no run has, before it traces the model."""

import pytest

import zeroamp
from tests.zeroamp.dry_run.plans import plan

WHOLE = "an integer >= 1"
MESH = "(replicas, shards), each an integer >= 1"
STAGES = "one or more of 0, 1, 2, 3"


def _never(batch, seq):
    pytest.fail("traced")


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("world_size", 0, WHOLE),
        ("world_size", -2, WHOLE),
        ("world_size", True, WHOLE),
        ("batch", 0, WHOLE),
        ("batch", -1, WHOLE),
        ("batch", 1.5, WHOLE),
        ("seq", 0, WHOLE),
        ("gpus_per_node", 0, WHOLE),
        ("mesh", (8,), MESH),
        ("mesh", (-2, -4), MESH),
        ("stages", [], STAGES),
        ("stages", (4,), STAGES),
        ("stages", (True,), STAGES),
    ],
)
def test_a_number_that_no_run_has_is_refused(name, value, valid):
    with pytest.raises(zeroamp.ConfigError) as raised:
        plan(inputs=_never, **{name: value})
    for part in (f"plan_run({name}=) ", valid, repr(value)):
        assert part in str(raised.value)


def test_where_no_stage_is_possible_the_reason_is_raised():
    with pytest.raises(zeroamp.ConfigError, match="mesh .* 8 ranks.* 3x3"):
        plan(inputs=_never, mesh=(3, 3), stages=(1, 2))
