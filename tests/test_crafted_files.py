"""Crafted files: none of them runs code, is read in place of what the manifest says, or changes a model.

The digests of crafted checkpoints match, unless a wrong digest is the kind.
"""

import hashlib
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata

import zeroamp

pytestmark = pytest.mark.timeout(60)
STEP, MARK = "step_00000001", "executed"
DATA, TRAIN, RANK = "__0_0.distcp", "train.pt", "rank_00000.pt"
CONFIG = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Harm:
    """Creates the file `MARK` in a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.system, (f"touch {self.folder / MARK}",)


class Getattr:
    """Calls `getattr` on an allowed class when it is unpickled."""

    def __reduce__(self):
        return getattr, (type(Path()), "home")


def _train(fill=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model.register_buffer("seen", torch.arange(3.0))
    if fill is not None:
        with torch.no_grad():
            for value in model.state_dict().values():
                value.fill_(fill)
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(CONFIG, world_size=1))
    return zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def _state(model):
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value
             for name, value in model.state_dict().items()}  # fmt: skip
    return {name: value.detach().clone() for name, value in whole.items()}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Return a folder with a folder of one checkpoint, and a folder of safetensors."""
    root = tmp_path_factory.mktemp("good")
    train = _train()
    train.backward(train.model(torch.ones(2, 4)).sum())
    train.step()
    zeroamp.save_checkpoint(root / "run", train.model, train, extra={"position": 1})
    (root / "hf").mkdir()
    save_file(_state(train.model), root / "hf" / SINGLE)
    yield root
    dist.destroy_process_group()  # which wrap_model has made in this process, for all tests here


def _manifest(folder, change):
    path = folder / STEP / "zeroamp.json"
    content = json.loads(path.read_text())
    content.pop("sha256")
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**content, "sha256": digest}))


def _put(folder, name, content):
    """Replace a file of the checkpoint, and correct the manifest."""
    (folder / STEP / name).write_bytes(content)
    record = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    _manifest(folder, lambda manifest: manifest["files"].update({name: record}))


def _metadata(folder, change):
    metadata = pickle.loads((folder / STEP / ".metadata").read_bytes())
    change(metadata)
    _put(folder, ".metadata", pickle.dumps(metadata))


def _values(folder, name, change):
    values = torch.load(folder / STEP / name)
    change(values)
    torch.save(values, folder / STEP / name)
    _put(folder, name, (folder / STEP / name).read_bytes())


def _places(folder, path):
    def move(metadata):
        for place in metadata.storage_data.values():
            place.relative_path = path

    _metadata(folder, move)


def _harm_in_place_of_a_tensor(folder, content, as_bytes=False):
    """Put harm where a chunk is, or describe it as bytes, which torch.distributed.checkpoint unpickles freely."""
    start = (folder / STEP / DATA).stat().st_size
    _put(folder, DATA, (folder / STEP / DATA).read_bytes() + content)

    def change(metadata):
        for name in metadata.state_dict_metadata if as_bytes else ():
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
        for place in metadata.storage_data.values():
            place.offset, place.length = start, len(content)

    _metadata(folder, change)


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _fifo(folder, name):
    (folder / STEP / name).unlink()
    os.mkfifo(folder / STEP / name)


def _link_out(folder, name):
    (folder / STEP / name).rename(folder / "outside")
    (folder / STEP / name).symlink_to(folder / "outside")


RECORD = {"num_bytes": 1, "sha256": "0" * 64}
# From protocol 4 on, a name may lead through attributes: this one to the `os` of an allowed module, and to `system`.
DOTTED = b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93\x8c\x04true\x85R."
CHECKPOINTS = {
    ".metadata: a call": lambda f: _put(f, ".metadata", pickle.dumps(Harm(f))),
    ".metadata: a call in place of a size": lambda f: _metadata(f, lambda m: m.state_dict_metadata.update(x=Harm(f))),
    ".metadata: a call of getattr": lambda f: _put(f, ".metadata", pickle.dumps(Getattr())),
    ".metadata: a dotted name": lambda f: _put(f, ".metadata", DOTTED),
    ".metadata: tensors as bytes": lambda f: _harm_in_place_of_a_tensor(f, pickle.dumps(Harm(f)), as_bytes=True),
    ".metadata: places in ../": lambda f: _places(f, f"../{STEP}/{DATA}"),
    ".metadata: places in a file that the manifest does not list": lambda f: _places(f, "zeroamp.json"),
    "a chunk: a call": lambda f: _harm_in_place_of_a_tensor(f, _saved(Harm(f))),
    "train.pt: a call": lambda f: _values(f, TRAIN, lambda v: v.update(train=Harm(f))),
    "train.pt: a call, as a plain pickle": lambda f: _put(f, TRAIN, pickle.dumps(Harm(f))),
    "train.pt: a FIFO": lambda f: _fifo(f, TRAIN),
    "rank: a call in extra": lambda f: _values(f, RANK, lambda v: v.update(extra=Harm(f))),
    "rank: a link out": lambda f: _link_out(f, RANK),
    "manifest: another digest": lambda f: _manifest(f, lambda m: m["files"][DATA].update(sha256="0" * 64)),
    "manifest: a file of ../": lambda f: _manifest(f, lambda m: m["files"].update({"../x": RECORD})),
    "manifest: 100,000 levels": lambda f: (f / STEP / "zeroamp.json").write_text("[" * 100_000),
    "manifest: a FIFO": lambda f: _fifo(f, "zeroamp.json"),
}


def _index(folder, file):
    (folder / SINGLE).rename(folder.parent / "elsewhere.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"0.weight": file(folder)}}))


def _file_out(folder):
    (folder / SINGLE).rename(folder.parent / "elsewhere.safetensors")
    (folder / SINGLE).symlink_to("../elsewhere.safetensors")


def _pickle_instead(folder):
    (folder / SINGLE).unlink()
    torch.save({"0.weight": Harm(folder)}, folder / "pytorch_model.bin")


SAFETENSORS = {
    "the index: ../": lambda f: _index(f, lambda _: "../elsewhere.safetensors"),
    "the index: an absolute path": lambda f: _index(f, lambda f: str(f.parent / "elsewhere.safetensors")),
    "the file: a link out": _file_out,
    "the file: a header of 2**60 bytes": lambda f: (f / SINGLE).write_bytes((2**60).to_bytes(8, "little") + b"{}"),
    "a pickle instead": _pickle_instead,
}


def _refused(root, read):
    train = _train(fill=7)
    before = _state(train.model)
    with pytest.raises(zeroamp.CheckpointError):
        read(train)
    assert not list(Path(root).rglob(MARK))
    after = _state(train.model)
    return all(torch.equal(after[name], before[name]) for name in before)


def test_the_good_files_are_read(good):
    loaded, filled = _train(fill=7), _train(fill=7)
    assert zeroamp.load_checkpoint(good / "run", loaded.model, loaded) == {"position": 1}
    zeroamp.load_hf(filled.model, good / "hf")
    ours, theirs = _state(loaded.model), _state(filled.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not torch.equal(ours["0.weight"], torch.full((6, 4), 7.0))


def _by_getattr(member, _protocol):
    return getattr, (type(member), member.name)


def test_a_checkpoint_of_an_early_python_3_11_is_read(monkeypatch, tmp_path):
    """Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of getattr."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", _by_getattr)
    train = _train()
    path = zeroamp.save_checkpoint(tmp_path, train.model, train)
    assert b"getattr" in (path / ".metadata").read_bytes()
    loaded = _train(fill=7)
    zeroamp.load_checkpoint(path, loaded.model, loaded)
    ours, theirs = _state(loaded.model), _state(train.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_crafted_checkpoint_is_refused_and_runs_nothing(good, tmp_path, kind):
    folder = tmp_path / "run"
    shutil.copytree(good / "run", folder)
    CHECKPOINTS[kind](folder)
    is_unchanged = _refused(tmp_path, lambda train: zeroamp.load_checkpoint(folder / STEP, train.model, train))
    assert is_unchanged or kind == "a chunk: a call"  # the chunk is the first that is read
    assert not list(tmp_path.rglob(MARK))


@pytest.mark.parametrize("kind", SAFETENSORS)
def test_crafted_weights_are_refused_and_run_nothing(good, tmp_path, kind):
    folder = tmp_path / "hf"
    shutil.copytree(good / "hf", folder)
    SAFETENSORS[kind](folder)
    assert _refused(tmp_path, lambda train: zeroamp.load_hf(train.model, folder))
