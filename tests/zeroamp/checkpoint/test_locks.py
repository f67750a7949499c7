"""The lock of a folder of checkpoints."""

import os

import pytest

from zeroamp.checkpoint.folder import locked
from zeroamp.policies.errors import CheckpointError
from zeroamp.weights import drafts


def test_a_lock_held_for_too_long_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(drafts, "TIMEOUT_S", 0.1)
    with locked(tmp_path) as has_locks:
        assert has_locks
        with pytest.raises(CheckpointError, match=r"^Another process .*\.lock .*0 s.*another folder"):
            locked(tmp_path).__enter__()
    with locked(tmp_path):
        pass


def test_a_process_forked_under_the_lock_does_not_keep_it(tmp_path, monkeypatch):
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(real(*args)) or opened[-1])
    monkeypatch.setattr(drafts, "TIMEOUT_S", 0.1)
    with locked(tmp_path):
        inherited = os.dup(opened[-1])  # a fork leaves the child one like this
    with locked(tmp_path):
        pass
    os.close(inherited)
