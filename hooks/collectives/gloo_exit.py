"""Lets gloo's threads come to rest before the interpreter shuts down.

[Note: Why a pause]
A thread of gloo lets go of a collective's tensors a moment after the collective has ended. Where Python let go of them
before, the thread needs the interpreter's lock for it; and a thread that asks for the lock while the interpreter shuts
down aborts the process, which had done all its work: torchrun reports a failure (pytorch issue 190489, and any program
on gloo). `destroy_process_group` would wait for the threads, but FSDP2's meshes keep the groups alive. So the main
thread sleeps, without the lock, before the interpreter shuts down.
"""

import atexit
import time
from functools import cache

_PAUSE_S = 0.1


@cache
def pause_before_exit() -> None:
    """Pause once when the program ends: at the first call, so that what is registered later runs before the pause."""
    atexit.register(_pause)


def _pause() -> None:
    time.sleep(_PAUSE_S)
