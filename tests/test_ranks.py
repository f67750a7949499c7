"""What a call in a rank of the tests leaves to the next one."""

import os
import threading
import time
from functools import partial

import pytest

from tests.processes.ranks import MOST_THREADS_LEFT, RankError, Ranks


@pytest.fixture
def rank():
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


def _change_the_environment():
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    del os.environ["MASTER_PORT"]
    os.environ["RANK"] = "3"


def _environment():
    return {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "MASTER_PORT", "RANK")}


def _leave_threads():
    for _ in range(MOST_THREADS_LEFT + 1):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def test_a_call_has_the_environment_of_the_first(rank):
    before = rank.run(_environment)
    rank.run(partial(_change_the_environment))
    assert rank.run(_environment) == before


def test_a_call_after_one_that_leaves_many_threads_fails_and_the_next_starts_fresh(rank):
    rank.run(_leave_threads)
    with pytest.raises(RankError, match=r"threads of earlier calls are left, the last of _leave_threads\."):
        rank.run(_environment)
    assert rank.run(_environment)[0]["RANK"] == "0"
