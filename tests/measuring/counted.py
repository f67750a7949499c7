"""How much Python runs, function by function: a measure of work that does not depend on the machine."""

import gc
import sys
from collections import Counter
from contextlib import contextmanager

from tests.measuring.sources import ROOT

OURS = tuple(str((ROOT / folder).resolve()) for folder in ("zeroamp", "hooks", "policies"))
SLACK = 300


@contextmanager
def counted():
    """Yield a Counter that fills up inside: (file, function) -> its calls; and of our own, its lines that ran too.

    A loop in one line counts once per turn.
    """
    work, is_ours = Counter(), {}

    def trace(frame, event, _argument):
        code = frame.f_code
        if code not in is_ours:
            is_ours[code] = code.co_filename.startswith(OURS)
        if event in ("call", "line"):
            work[code.co_filename, code.co_qualname] += 1
        return trace if is_ours[code] else None

    before = sys.gettrace()
    gc.collect()  # what earlier models left goes now, not while this one is counted
    gc.disable()
    sys.settrace(trace)
    try:
        yield work
    finally:
        sys.settrace(before)
        gc.enable()


def outgrown(few, many, factor):
    """Return what took more than `factor` times the work: (work before, after) by function.

    With some slack, since of n blocks n - 1 have a neighbour. `__eq__` is left out: a cache calls it where it hits.
    """
    grown = {key: (few[key], work) for key, work in many.items() if work > factor * few[key] + SLACK}
    return {(file, name): works for (file, name), works in grown.items() if not name.endswith("__eq__")}
