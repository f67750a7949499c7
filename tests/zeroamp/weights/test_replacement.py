"""Exports into a folder that has weights: a load finds all old or all new weights, whatever fails and whenever."""

import builtins
import errno
import fcntl
import io
import json
import os
import signal
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from unittest import mock

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

import zeroamp
from tests.processes.training import same_bits
from tests.selection import slow_but
from zeroamp.weights.files import INDEX, SINGLE_FILE, stored_tensors, write_weights

OPERATIONS = [
    *((os, name) for name in ("open", "close", "fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir")),
    *((os, name) for name in ("chmod", "scandir", "listdir", "stat", "lstat")),
    (io, "open"),
    (builtins, "open"),
    (fcntl, "flock"),
    (safetensors.torch, "save_file"),
]
SHAPES = {"a.weight": (4, 4), "b.weight": (8,), "c.bias": (3,)}
LARGE, SMALL = 10**9, 40
"""`max_shard_bytes` of one file, and of several."""


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # it takes long, and a test cannot see what it does


def tensors_of(value):
    return {name: torch.full(shape, float(value)) for name, shape in SHAPES.items()}


def export(folder, value, max_shard_bytes):
    def write_config(draft):
        (draft / "config.json").write_text("{}")

    for _ in write_weights(tensors_of(value), folder, write_config, max_shard_bytes):
        pass


class Faults:
    """Counts file operations, and lets the n-th fail: before or after it was done."""

    def __init__(self, number=None, fault=None, when="before"):
        self.number, self.fault, self.when, self.count = number, fault, when, 0

    def counted(self, real):
        def call(*args, **kwargs):
            self.count += 1
            if self.count != self.number:
                return real(*args, **kwargs)
            if self.when == "after":
                made = real(*args, **kwargs)
                if hasattr(made, "close"):
                    made.close()
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise self.fault()

        return call

    @contextmanager
    def active(self):
        with ExitStack() as stack:
            for module, name in OPERATIONS:
                stack.enter_context(mock.patch.object(module, name, self.counted(getattr(module, name))))
            yield


def by_rules_of_transformers(folder):
    """The tensors that `from_pretrained` finds: it prefers the single file. None: no weights."""
    if (folder / SINGLE_FILE).exists():
        return load_file(folder / SINGLE_FILE)
    if not (folder / INDEX).exists():
        return None
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(weight_map.values())}
    return {name: files[file][name] for name, file in weight_map.items()}


def by_load_hf(folder):
    with ExitStack() as stack:
        if not (folder / SINGLE_FILE).exists() and not (folder / INDEX).exists():
            return None
        return {name: each.read() for name, each in stored_tensors(folder, stack).items()}


def value_in(folder):
    """The value of all weights in a folder, or None."""
    found, theirs = by_load_hf(folder), by_rules_of_transformers(folder)
    assert (found is None) == (theirs is None)
    if found is None:
        return None
    (value,) = {float(each) for tensor in found.values() for each in tensor.flatten()}
    assert same_bits(found, tensors_of(value)) == same_bits(theirs, tensors_of(value)) == []
    return value


def nothing(folder):
    folder.mkdir()


def one_file(folder):
    export(folder, 1, LARGE)


def several(folder):
    export(folder, 1, SMALL)


def several_with_ids(folder):
    several(folder)
    several(folder)


def one_file_beside_an_index(folder):
    """As an export that was killed before it removed the files of the index."""
    export(folder, 0, SMALL)
    save_file(tensors_of(1), folder / SINGLE_FILE)


CASES = [
    *((prepare, max_shard_bytes) for prepare in (one_file, several) for max_shard_bytes in (LARGE, SMALL)),
    *((nothing, SMALL), (several_with_ids, SMALL), (one_file_beside_an_index, LARGE)),
]
FAULTS = {"error": partial(OSError, errno.EIO, "a fault"), "interrupt": KeyboardInterrupt}


def _is_exported(folder, max_shard_bytes, value):
    """Whether an export that nothing disturbs succeeds, and leaves no other weights and no draft."""
    export(folder, value, max_shard_bytes)
    shards = {name for name in os.listdir(folder) if name.endswith(".safetensors")}
    listed = {SINGLE_FILE}
    if max_shard_bytes == SMALL:
        listed = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    others = {"config.json", INDEX} if max_shard_bytes == SMALL else {"config.json"}
    return value_in(folder) == value and shards == listed and set(os.listdir(folder)) == listed | others


@pytest.mark.parametrize("case", slow_but(CASES, (one_file, SMALL), (several, SMALL)))
def test_a_fault_at_any_file_operation_loses_no_weights(tmp_path, case):
    """The error or its absence says which weights are in the folder, and another export succeeds."""
    prepare, max_shard_bytes = case
    old = None if prepare is nothing else 1.0
    num_points = 0
    for kind, fault in FAULTS.items():
        for when in ("before", "after"):
            number, is_done = 0, False
            while not is_done:
                number += 1
                folder = tmp_path / f"{kind}-{when}-{number}"
                prepare(folder)
                faults = Faults(number, fault, when)
                try:
                    with faults.active():
                        export(folder, 2, max_shard_bytes)
                    expected = {2.0}
                except zeroamp.CheckpointError as error:
                    expected = {old} if f"Weights that {folder} had before are unchanged" in str(error) else set()
                except KeyboardInterrupt:
                    expected = {old, 2.0}
                is_done = faults.count < number
                num_points += not is_done
                assert value_in(folder) in expected, (kind, when, number)
                assert _is_exported(folder, max_shard_bytes, 3.0), (kind, when, number, os.listdir(folder))
    print(num_points, "points")
    assert num_points > 4 * 20


@pytest.mark.parametrize("case", slow_but(CASES, (several, LARGE)))
def test_a_kill_at_any_file_operation_loses_no_weights(tmp_path, case):
    """The next export removes what the killed one left."""
    prepare, max_shard_bytes = case
    old = None if prepare is nothing else 1.0
    number, is_killed = 0, True
    while is_killed:
        number += 1
        folder = tmp_path / str(number)
        prepare(folder)
        child = os.fork()
        if child == 0:
            with Faults(number, "kill").active():
                export(folder, 2, max_shard_bytes)
            os._exit(0)
        is_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        assert value_in(folder) in ({old, 2.0} if is_killed else {2.0}), number
        assert _is_exported(folder, max_shard_bytes, 3.0), (number, os.listdir(folder))
    print(number - 1, "points")
    assert number > 20


def test_a_reader_beside_exports_never_mixes_them(tmp_path):
    """It gets the weights of one export, or an error because a file has been removed."""
    writer = os.fork()
    if writer == 0:
        with suppress(BaseException):
            for value in range(1, 10_000):
                export(tmp_path, value, (SMALL, SMALL, LARGE)[value % 3])
        os._exit(0)
    found = []
    try:
        while len(set(found)) < 60:
            for read in (by_load_hf, by_rules_of_transformers):
                with suppress(
                    zeroamp.CheckpointError, *([OSError, RuntimeError] if read is by_rules_of_transformers else [])
                ):
                    tensors = read(tmp_path) or {}
                    values = {float(each) for tensor in tensors.values() for each in tensor.flatten()}
                    assert len(values) <= 1
                    found += values
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert found == sorted(found)  # nor does an older export come back
