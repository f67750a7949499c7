"""Waits for gloo's threads before the interpreter shuts down.

[Note: Why a pause]
A gloo thread releases a collective's tensors shortly after the collective has ended. If Python released them earlier,
the thread needs the GIL to free them. A thread that takes the GIL during the interpreter's shutdown aborts the process:
torchrun reports a failure, although all work is done (pytorch issue 190489; any program on gloo is affected).
`destroy_process_group` would wait for the threads, but FSDP2's meshes keep the process groups alive. So the main thread
sleeps, without the GIL, before the interpreter shuts down.
"""

import atexit
import time
from functools import cache

_PAUSE_S = 0.1


@cache
def pause_before_exit() -> None:
    """Pause once when the program ends. Call early: functions that `atexit` registers later run before the pause."""
    atexit.register(_pause)


def _pause() -> None:
    time.sleep(_PAUSE_S)
