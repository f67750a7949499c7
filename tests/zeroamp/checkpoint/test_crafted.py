"""Checkpoints that were tampered with, digests made to fit: `export_checkpoint` refuses all, and runs nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_saver import save

import zeroamp
from benchmarks.crafted import checkpoints
from benchmarks.crafted.variant import MARK, special
from tests.selection import slow_but
from tests.zeroamp.checkpoint.checkpoint_files import manifest
from zeroamp.checkpoint.manifest import record_file

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]
NAMES = {"0.weight": (6, 4), "0.bias": (6,), "seen": (3,), "scalar": ()}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with one checkpoint of four tensors."""
    checkpoint = tmp_path / "run" / checkpoints.STEP
    checkpoint.mkdir(parents=True)
    tensors = {
        f"model.{name}": torch.arange(24.0)[: torch.Size(shape).numel()].view(shape) for name, shape in NAMES.items()
    }
    save(tensors, checkpoint_id=checkpoint, no_dist=True)
    torch.save({"tensors": {}, "extra_states": {}, "extra": None}, checkpoint / "rank_00000.pt")
    torch.save({}, checkpoint / "train.pt")
    weights = [{"saved": name, "written": [name], "is_parameter": True} for name in NAMES]
    (checkpoint / "weights.json").write_text(json.dumps(weights))
    (checkpoint / "config.json").write_text("{}")
    files = {path.name: record_file(path) for path in checkpoint.iterdir()}
    (checkpoint / "zeroamp.json").write_text(manifest(files=files).to_json())
    return checkpoint.parent


def test_the_good_one_is_exported(folder):
    zeroamp.export_checkpoint(folder, folder.parent / "out")
    found = load_file(folder.parent / "out" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == NAMES
    assert torch.equal(found["0.weight"], torch.arange(24.0).view(6, 4))


def _by_getattr(member, _protocol):
    return getattr, (type(member), member.name)


def test_one_that_an_early_python_3_11_wrote_is_exported(monkeypatch, tmp_path, request):
    """Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of getattr."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", _by_getattr)
    folder = request.getfixturevalue("folder")
    assert b"getattr" in next(folder.iterdir()).joinpath(".metadata").read_bytes()
    zeroamp.export_checkpoint(folder, tmp_path / "out")
    assert {
        name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "out/model.safetensors").items()
    } == NAMES


def refused(folder, craft):
    craft(folder)
    with pytest.raises(zeroamp.CheckpointError) as raised:
        zeroamp.export_checkpoint(folder / checkpoints.STEP, folder.parent / "out")
    assert not list(folder.parent.rglob(MARK))
    assert "\x1b" not in str(raised.value)
    assert not (folder.parent / "out").exists()
    return str(raised.value)


@pytest.mark.parametrize("name", checkpoints.METADATA)
def test_metadata(folder, name):
    refused(folder, checkpoints.METADATA[name])


@pytest.mark.parametrize(
    "name", slow_but(checkpoints.CHUNKS, *(name for name in checkpoints.CHUNKS if "bomb" not in name))
)
def test_chunks(folder, monkeypatch, name):
    monkeypatch.setattr(checkpoints, "BOMB_BYTES", 4 * 1024**2)
    refused(folder, checkpoints.chunk(checkpoints.CHUNKS[name]))


@pytest.mark.parametrize("name", [*checkpoints.FILES, *checkpoints.MANIFESTS, *checkpoints.EXPORTS])
def test_files_manifests_and_lists(folder, name):
    crafts = checkpoints.FILES | checkpoints.MANIFESTS | checkpoints.EXPORTS
    refused(folder, crafts[name])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a chunk that covers half", "the chunks of model.0.weight do not have the elements"),
        ("overlap and gap of equal volume", "two chunks of model.0.weight overlap"),
        ("a place of ../", r"no record of \.\./"),
        ("a place with a transformation", "has a chunk of 96 bytes"),
        ("9 bytes that remember 2**29 objects", "pickle of 9 bytes has 536,870,911 objects"),
    ],
)
def test_the_reason_is_named(folder, name, words):
    refused(folder, checkpoints.METADATA[name])
    with pytest.raises(zeroamp.CheckpointError, match=words):
        zeroamp.export_checkpoint(folder / checkpoints.STEP, folder.parent / "out")


@pytest.mark.parametrize("name", checkpoints.POINTERS)
def test_what_lies_beside_a_checkpoint_hides_it_from_nobody(folder, name):
    checkpoints.POINTERS[name](folder)
    assert zeroamp.latest_checkpoint(folder) == folder / checkpoints.STEP


def test_a_checkpoint_may_be_reached_by_a_link(folder):
    (folder.parent / "best").symlink_to(folder / checkpoints.STEP)
    zeroamp.export_checkpoint(folder.parent / "best", folder.parent / "out")
    assert (folder.parent / "out" / "model.safetensors").exists()


def test_a_link_within_a_checkpoint_is_followed(folder):
    path = folder / checkpoints.STEP / "weights.json"
    path.rename(path.with_name("other"))
    path.symlink_to("other")
    zeroamp.export_checkpoint(folder, folder.parent / "export")
    assert "link that leads out" in refused(folder, special(f"{checkpoints.STEP}/config.json", "link out"))
