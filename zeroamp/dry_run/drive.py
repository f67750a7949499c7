"""Lets a traced micro-batch drive the replay of FSDP2's schedule."""

from zeroamp.dry_run.events import Mark
from zeroamp.planning.replay import Replay

MAX_MICRO_BATCHES = 3
"""Of a longer window the first, one from the middle and the last are replayed: those in between are alike."""


def drive(replay: Replay, mark: Mark, *, is_last: bool) -> None:
    """Let the replay do what FSDP2 does at a mark; `is_last` is that of the micro-batch in its window."""
    if mark.point == "begin forward":
        replay.begin_forward(mark.unit)
    elif mark.point == "end forward":
        replay.end_forward(mark.unit)
    elif mark.point == "begin backward":
        replay.begin_backward(mark.unit)
    else:
        replay.end_backward(mark.unit, is_last=is_last)
