"""Waits for gloo's threads before the interpreter shuts down.

[Note: Why a pause]
A gloo thread releases a collective's tensors shortly after the collective has ended. If Python released them earlier,
the thread needs the GIL to free them. A thread that takes the GIL while the interpreter shuts down aborts the process
after all its work is done, and torchrun reports a failure (pytorch issue 190489; any program on gloo is affected).
`destroy_process_group` would wait for the threads, but FSDP2's meshes keep the process groups alive. So the main thread
sleeps, without the GIL, before the interpreter shuts down.
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
