"""`StepRecord`: to JSON and back, and what monitors get."""

import json
import math

import pytest

from tests.zeroamp.reporting.records import record
from zeroamp.reporting.step_record import StepRecord


def test_a_record_survives_strict_json():
    before = record(7, loss=math.inf, grad_norm=-math.inf, traffic_bytes={"all_gather bf16": 12}, num_tokens=3)
    text = json.dumps(before.to_json(), allow_nan=False)
    assert StepRecord.from_json(json.loads(text)) == before
    assert math.isnan(StepRecord.from_json(json.loads(json.dumps(record(loss=math.nan).to_json()))).loss)


def test_fields_of_a_newer_version_are_left_out():
    assert StepRecord.from_json(record().to_json() | {"colour": 3}) == record()


@pytest.mark.parametrize(
    "broken",
    [
        {"loss": None},
        {"step": 1.5},
        {"step_s": [1.0]},
        {"lr": None},
        {"lr": 0.1},
        {"traffic_bytes": None},
        {"traffic_bytes": {"all_gather bf16": "many"}},
    ],
)
def test_what_is_none_of_a_fields_kind_is_refused(broken):
    with pytest.raises(TypeError):
        StepRecord.from_json(record().to_json() | broken)


def test_monitors_get_what_is_known_with_one_name_per_number():
    scalars = record(lr=(0.1, 0.2), mfu=0.5, traffic_bytes={"all_gather bf16": 12}).scalars()
    assert (scalars["lr/0"], scalars["lr/1"], scalars["mfu"]) == (0.1, 0.2, 0.5)
    assert scalars["traffic_bytes/all_gather_bf16"] == 12
    assert "peak_active_gib" not in scalars
    assert record(lr=(0.1,)).scalars()["lr"] == 0.1


def test_the_rest_of_a_step_is_what_no_part_took():
    assert math.isclose(record().other_s, 0.3)
    assert math.isclose(record().busy_s, 0.9)
