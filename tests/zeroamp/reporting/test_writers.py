"""Writers that fail: each is closed, is said once, and stops no other."""

import pytest

from tests.measuring.logs import log_lines
from tests.zeroamp.reporting.records import record
from zeroamp.reporting.writers import Writer, Writers


class Place:
    """Notes what it is asked for; fails in one of them."""

    def __init__(self, failing=None):
        self.failing, self.calls = failing, []

    def _note(self, call):
        self.calls.append(call)
        if call == self.failing:
            raise OSError("no space")

    def step(self, record):
        self._note("step")

    def warning(self, name, text):
        self._note("warning")

    def close(self):
        self._note("close")


class PlaceWithoutWarnings(Writer):
    def __init__(self):
        self.calls = []

    def step(self, record):
        self.calls.append("step")

    def close(self):
        self.calls.append("close")


def write_everything(*places):
    """Return the lines of the log."""
    writers = Writers()
    for place in places:
        writers.add(place)
    with log_lines() as lines:
        writers.warning("slow rank", "rank 1")
        writers.step(record(7))
        writers.close()
        writers.close()
    return lines


@pytest.mark.parametrize(
    ("failing", "calls", "loss"),
    [
        ("warning", ["warning", "close"], "nothing is written from the warning of slow rank on"),
        ("step", ["warning", "step", "close"], "nothing is written from step 7 on"),
        ("close", ["warning", "step", "close", "close"], "its end may be missing"),
    ],
)
def test_one_that_fails_is_closed_and_the_others_go_on(failing, calls, loss):
    before, bad, after = Place(), Place(failing), Place()
    assert write_everything(before, bad, after) == [
        f"Place: {loss}, because of OSError: no space. Training continues",
    ]
    assert bad.calls == calls
    assert before.calls == after.calls == ["warning", "step", "close"]


def test_warnings_go_where_there_is_a_place_for_them():
    without, with_warnings = PlaceWithoutWarnings(), Place()
    assert write_everything(without, with_warnings) == []
    assert without.calls == ["step", "close"]
    assert with_warnings.calls == ["warning", "step", "close"]
