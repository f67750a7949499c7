"""A program that used gloo pauses before the interpreter shuts down, see [Note: Why a pause]."""

from tests.processes.launch import completed

PROGRAM = """
import atexit, torch.distributed as dist, zeroamp
from torch import nn
from zeroamp.hooks.collectives import gloo_exit as exit_pause

exit_pause.time = type("Time", (), {"sleep": staticmethod(lambda seconds: print("paused for", seconds))})
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for index in range(2):
    zeroamp.wrap_model(nn.Linear(2, 2), zeroamp.policy_from_config({}))
    atexit.register(print, "registered after wrapping", index)
dist.destroy_process_group()
print("destroyed")
raise ValueError
"""


def test_once_after_all_that_was_registered_later_and_also_after_an_exception():
    registered = [f"registered after wrapping {index}" for index in (1, 0)]
    done = completed("-c", PROGRAM)
    assert (done.returncode, done.stdout.splitlines()) == (1, ["destroyed", *registered, "paused for 0.1"])
