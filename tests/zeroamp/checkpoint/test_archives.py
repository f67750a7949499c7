"""`load_archive`: reads what torch.save writes, and refuses whatever would run code or take more room than the file."""

import io
import os
from collections import Counter, OrderedDict

import pytest
import torch

from benchmarks.crafted import checkpoints
from benchmarks.crafted.variant import MARK, harm, saved
from zeroamp.checkpoint.archives import load_archive
from zeroamp.policies.errors import CheckpointError

PLAIN = [
    None,
    {"a": [1, 2.5, "x", True, (None, b"bytes", bytearray(b"xy"), {1, 2}, 3j)], 7: {}},
    OrderedDict(a=torch.Size((2, 3)), b=torch.float8_e4m3fn, c=torch.device("cpu"), d=Counter("aab")),
    2**100,
    "\x1b[31m",
]
TENSORS = {
    "of every kind": [
        torch.zeros(3, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.cfloat)
    ],
    "float8": torch.zeros(3).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "view": torch.arange(12).view(3, 4).T[1:],
    "expanded": torch.ones(1).expand(5),
    "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "one storage twice": (lambda tensor: [tensor, tensor[1:]])(torch.arange(4)),
}


HARMLESS = {"a dict", "a tensor expanded to 2**40 elements", "lists in 100,000 levels"}
"""As files of torch.save. What is in them fits nowhere."""


@pytest.mark.parametrize("value", PLAIN)
def test_plain_values_read_back(value):
    assert load_archive(io.BytesIO(saved(value)), "file") == value


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("mmap", [False, True])
def test_tensors_read_back(tmp_path, name, mmap):
    torch.save(TENSORS[name], tmp_path / "file")
    found = load_archive(tmp_path / "file", "file", mmap=mmap)
    for ours, theirs in zip(*(x if isinstance(x, list) else [x] for x in (found, TENSORS[name])), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tolist() == theirs.tolist()


def test_a_file_of_many_gigabytes_has_its_directory_elsewhere(tmp_path):
    """Torch writes the 64-bit end of such a file; whether one without it is read shows on a file of zipfile's."""
    assert b"PK\6\6" in saved([1])
    assert load_archive(io.BytesIO(checkpoints.archive([1])), "file") == [1]


@pytest.mark.parametrize("name", sorted(checkpoints.ARCHIVES.keys() - HARMLESS))
def test_what_means_harm_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(checkpoints, "BOMB_BYTES", 4 * 1024**2)
    path = tmp_path / "file"
    path.write_bytes(checkpoints.ARCHIVES[name](tmp_path))
    for mmap in (False, True):
        with pytest.raises(CheckpointError, match=r"^file (is not read|cannot be read)") as raised:
            load_archive(path, "file", mmap=mmap)
        assert "weights_only" not in str(raised.value)
    assert not (tmp_path / MARK).exists()


def test_what_a_pickle_names_is_named_without_advice_to_switch_the_check_off(tmp_path):
    with pytest.raises(CheckpointError, match=r"refers to posix.system, .*could run any code.*safe_globals") as raised:
        load_archive(io.BytesIO(checkpoints.archive({"a": harm(tmp_path)})), "file")
    assert "weights_only" not in str(raised.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "file"
    {"fifo": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}[kind](path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_archive(path, "file")
