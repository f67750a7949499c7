"""`plan_run` refuses numbers that no run has, before it traces the model."""

import dataclasses
import math

import pytest

import zeroamp
from tests.zeroamp.dry_run.plans import FULL, plan
from zeroamp.dry_run.efficiency import Efficiency

WHOLE = "an integer >= 1"
POSITIVE = "a positive number"
PART = "a number above 0, at most 1"
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
        ("intra_gb_per_s", -1, POSITIVE),
        ("intra_gb_per_s", 0, POSITIVE),
        ("inter_gb_per_s", math.nan, POSITIVE),
    ],
)
def test_a_number_that_no_run_has_is_refused(name, value, valid):
    with pytest.raises(zeroamp.ConfigError) as raised:
        plan(inputs=_never, **{name: value})
    for part in (f"plan_run({name}=) ", valid, repr(value)):
        assert part in str(raised.value)


def test_figures_of_a_gpu_and_parts_that_are_reached_are_refused_too():
    with pytest.raises(zeroamp.ConfigError, match=r"gpu\.low_tflops.* a positive number.* 0"):
        plan(inputs=_never, gpu=dataclasses.replace(FULL, low_tflops=0))
    efficiency = Efficiency(network=1.5)
    with pytest.raises(zeroamp.ConfigError, match=rf"efficiency\.network.* {PART}.* 1\.5"):
        plan(inputs=_never, efficiency=efficiency)


def test_where_no_stage_is_possible_the_reason_is_raised():
    with pytest.raises(zeroamp.ConfigError, match="mesh .* 8 ranks.* 3x3"):
        plan(inputs=_never, mesh=(3, 3), stages=(1, 2))
