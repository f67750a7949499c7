"""Crafted files: none of them runs code, is read in place of what the manifest says, or changes a model.

The digests of crafted checkpoints match, unless a wrong digest is the kind.
"""

import hashlib
import inspect
import io
import json
import math
import os
import pickle
import shutil
import sys
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


def _as_format_2(folder):
    """Remove the layout from the manifest. `.metadata`, which torch has written, is then read instead."""
    _manifest(folder, lambda manifest: (manifest.pop("tensors"), manifest.update(format=2)))


def _put_metadata(folder, content):
    _as_format_2(folder)
    _put(folder, ".metadata", content)


def _metadata(folder, change):
    metadata = pickle.loads((folder / STEP / ".metadata").read_bytes())
    change(metadata)
    _put_metadata(folder, pickle.dumps(metadata))


def _layout(folder, change, name="model.0.weight"):
    """Change the layout of a tensor: `change` gets it, its first chunk as a list, and the manifest."""

    def change_manifest(manifest):
        layout = manifest["tensors"][name]
        change(layout, layout["chunks"][0], manifest)

    _manifest(folder, change_manifest)


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
        for name in metadata.state_dict_metadata:
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
        for place in metadata.storage_data.values():
            place.offset, place.length = start, len(content)

    def move(manifest):
        for layout in manifest["tensors"].values():
            layout["chunks"][0][3:] = start, len(content)

    if as_bytes:
        _metadata(folder, change)
    else:
        _manifest(folder, move)


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


def _split(layout, chunk, at, overlap=0):
    """Divide the only chunk of a tensor into two along the first dimension, which may overlap."""
    offsets, shape, *place = chunk
    first, second = [offsets, [at, *shape[1:]], *place], [[at - overlap, *offsets[1:]], shape, *place]
    second[1] = [shape[0] - at + overlap, *shape[1:]]
    layout["chunks"] = [first, second]


def _two_files_of_the_rank(manifest):
    manifest["files"]["rank_00001.pt"] = manifest["files"][RANK]


def _groups(folder, **values):
    _values(folder, TRAIN, lambda v: v["optimizers"][0]["groups"][0].update(values))


RECORD = {"num_bytes": 1, "sha256": "0" * 64}
_OF_METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
# From protocol 4 on, a name may lead through attributes: this one to the `os` of an allowed module, and to `system`.
DOTTED = b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93\x8c\x04true\x85R."
# BUILD with slots calls setattr on whatever is on the stack: here on a class.
SET_ATTRIBUTE = _OF_METADATA + b"N}(Vstate_dict_metadata\nI1\nu\x86b."
SET_ATTRIBUTE_OF_PATH = b"cpathlib\nPosixPath\nN}(Vexists\nI1\nu\x86b."
SET_METHOD = _OF_METADATA + b"N}(V__setstate__\ncos\nsystem\nu\x86b."
CHECKPOINTS = {
    ".metadata: a call": lambda f: _put_metadata(f, pickle.dumps(Harm(f))),
    ".metadata: a call in place of a size": lambda f: _metadata(f, lambda m: m.state_dict_metadata.update(x=Harm(f))),
    ".metadata: a call of getattr": lambda f: _put_metadata(f, pickle.dumps(Getattr())),
    ".metadata: a dotted name": lambda f: _put_metadata(f, DOTTED),
    ".metadata: an attribute of a class": lambda f: _put_metadata(f, SET_ATTRIBUTE),
    ".metadata: an attribute of Path": lambda f: _put_metadata(f, SET_ATTRIBUTE_OF_PATH),
    ".metadata: a method of a class": lambda f: _put_metadata(f, SET_METHOD),
    ".metadata: tensors as bytes": lambda f: _harm_in_place_of_a_tensor(f, pickle.dumps(Harm(f)), as_bytes=True),
    ".metadata: places in ../": lambda f: _places(f, f"../{STEP}/{DATA}"),
    ".metadata: places in a file that the manifest does not list": lambda f: _places(f, "zeroamp.json"),
    ".metadata: no chunk": lambda f: _metadata(f, lambda m: m.state_dict_metadata["model.0.weight"].chunks.clear()),
    ".metadata: is not listed": lambda f: (_as_format_2(f), _manifest(f, lambda m: m["files"].pop(".metadata"))),
    "a chunk: a call": lambda f: _harm_in_place_of_a_tensor(f, _saved(Harm(f))),
    "a chunk: another dtype": lambda f: _harm_in_place_of_a_tensor(f, _saved(torch.ones(6, 4).int())),
    "a chunk: one row short": lambda f: _harm_in_place_of_a_tensor(f, _saved(torch.ones(5, 4))),
    "a chunk: no tensor": lambda f: _harm_in_place_of_a_tensor(f, _saved({"x": 1})),
    "layout: no chunk": lambda f: _layout(f, lambda layout, c, m: layout["chunks"].clear()),
    "layout: one row short": lambda f: _layout(f, lambda layout, c, m: c[1].__setitem__(0, 5)),
    "layout: offsets of 1e9": lambda f: _layout(f, lambda layout, c, m: c[0].__setitem__(0, 10**9)),
    "layout: a chunk twice": lambda f: _layout(f, lambda layout, c, m: layout["chunks"].append(c)),
    "layout: chunks that overlap": lambda f: _layout(f, lambda layout, c, m: _split(layout, c, 3, overlap=1)),
    "layout: an empty chunk": lambda f: _layout(f, lambda t, c, m: t["chunks"].append([[6, 0], [0, 4], *c[2:]])),
    "layout: as many elements, elsewhere": lambda f: _layout(f, lambda layout, c, m: c.__setitem__(1, [4, 6])),
    "layout: a negative offset": lambda f: _layout(f, lambda layout, c, m: c[0].__setitem__(0, -1)),
    "layout: a dimension more": lambda f: _layout(f, lambda layout, c, m: (c[0].append(0), c[1].append(1))),
    "layout: bytes after the end": lambda f: _layout(f, lambda layout, c, m: c.__setitem__(3, 10**9)),
    "layout: more bytes than the file has": lambda f: _layout(f, lambda layout, c, m: c.__setitem__(4, 2**62)),
    "layout: a start as text": lambda f: _layout(f, lambda layout, c, m: c.__setitem__(3, "0")),
    "layout: a file of ../": lambda f: _layout(f, lambda layout, c, m: c.__setitem__(2, f"../{STEP}/{DATA}")),
    "layout: a file that is not listed": lambda f: _layout(f, lambda layout, c, m: c.__setitem__(2, "zeroamp.json")),
    "layout: a dtype that is a function": lambda f: _layout(f, lambda layout, c, m: layout.update(dtype="load")),
    "layout: another shape": lambda f: _layout(f, lambda layout, c, m: layout.update(shape=[2**40, 2**40])),
    "layout: another shape of a moment": lambda f: _layout(
        f, lambda layout, c, m: (layout.update(shape=[24, 1]), c.__setitem__(1, [24, 1])), "optimizer.0.weight.exp_avg"
    ),
    "layout: a tensor less": lambda f: _manifest(f, lambda m: m["tensors"].pop("optimizer.0.weight.exp_avg")),
    "layout: is missing": lambda f: _manifest(f, lambda m: m.pop("tensors")),
    "train.pt: a call": lambda f: _values(f, TRAIN, lambda v: v.update(train=Harm(f))),
    "train.pt: a call, as a plain pickle": lambda f: _put(f, TRAIN, pickle.dumps(Harm(f))),
    "train.pt: a FIFO": lambda f: _fifo(f, TRAIN),
    "train.pt: steps as text": lambda f: _values(f, TRAIN, lambda v: v["train"].update(num_steps="x")),
    "train.pt: a NaN learning rate": lambda f: _groups(f, lr=math.nan),
    "train.pt: a learning rate as text": lambda f: _groups(f, lr="0.1"),
    "train.pt: infinite betas": lambda f: _groups(f, betas=(0.9, math.inf)),
    "train.pt: a list": lambda f: _values(f, TRAIN, lambda v: v.update(optimizers=3)),
    "rank: a call in extra": lambda f: _values(f, RANK, lambda v: v.update(extra=Harm(f))),
    "rank: a link out": lambda f: _link_out(f, RANK),
    "rank: a buffer that nothing fills": lambda f: (
        _values(f, RANK, lambda v: v["tensors"].clear()), _manifest(f, lambda m: m["tensors"].pop("model.seen"))
    ),
    "manifest: another digest": lambda f: _manifest(f, lambda m: m["files"][DATA].update(sha256="0" * 64)),
    "manifest: a file of ../": lambda f: _manifest(f, lambda m: m["files"].update({"../x": RECORD})),
    "manifest: no rank": lambda f: _manifest(f, lambda m: m.update(world_size=0, mesh=[0])),
    "manifest: ranks without files": lambda f: _manifest(f, lambda m: m.update(world_size=10**12, mesh=[10**12])),
    "manifest: a file for a rank that is none": lambda f: _manifest(f, _two_files_of_the_rank),
    "manifest: another mesh": lambda f: _manifest(f, lambda m: m.update(mesh=[2])),
    "manifest: a negative step": lambda f: _manifest(f, lambda m: m.update(step=-1)),
    "manifest: a size as text": lambda f: _manifest(f, lambda m: m["files"][DATA].update(num_bytes="1")),
    "manifest: a digest of one letter": lambda f: _manifest(f, lambda m: m["files"][DATA].update(sha256="0")),
    "manifest: 100,000 levels": lambda f: (f / STEP / "zeroamp.json").write_text("[" * 100_000),
    "manifest: a FIFO": lambda f: _fifo(f, "zeroamp.json"),
}  # fmt: skip


def _attributes_of_classes():
    """Return the attributes of all classes that a load could reach."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("zeroamp", "torch.distributed.checkpoint", "torch.serialization", "pathlib")):
            for cls in [value for value in vars(module).values() if inspect.isclass(value)]:
                found[cls] = {key: id(value) for key, value in vars(cls).items() if key not in ("_abc_impl", "next_id")}
    return found


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


def test_a_format_2_checkpoint_of_an_early_python_3_11_is_read(monkeypatch, tmp_path):
    """Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of getattr."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", _by_getattr)
    train = _train()
    path = zeroamp.save_checkpoint(tmp_path / "run", train.model, train, step=1)
    assert b"getattr" in (path / ".metadata").read_bytes()
    _as_format_2(tmp_path / "run")
    loaded = _train(fill=7)
    zeroamp.load_checkpoint(path, loaded.model, loaded)
    ours, theirs = _state(loaded.model), _state(train.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _bits(train):
    # of a model that was loaded in part, too: its state_dict raises
    return [parameter.detach().full_tensor().clone() for parameter in train.model.parameters()]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_crafted_checkpoint_is_refused_and_runs_nothing(good, tmp_path, kind):
    """Only what is wrong inside of a chunk is found after the load has begun: the model is then marked."""
    folder = tmp_path / "run"
    shutil.copytree(good / "run", folder)
    CHECKPOINTS[kind](folder)
    train = _train(fill=7)
    before, attributes = _bits(train), _attributes_of_classes()
    with pytest.raises(zeroamp.CheckpointError):
        zeroamp.load_checkpoint(folder / STEP, train.model, train)
    after = _attributes_of_classes()
    assert [cls for cls, values in attributes.items() if after[cls] != values] == []
    assert not list(tmp_path.rglob(MARK))
    assert all(map(torch.equal, _bits(train), before))
    if kind.startswith("a chunk: "):
        with pytest.raises(zeroamp.StepError, match="Call zeroamp.load_checkpoint again"):
            train.model(torch.ones(2, 4))
    else:
        train.model(torch.ones(2, 4))


@pytest.mark.parametrize("kind", SAFETENSORS)
def test_crafted_weights_are_refused_and_run_nothing(good, tmp_path, kind):
    folder = tmp_path / "hf"
    shutil.copytree(good / "hf", folder)
    SAFETENSORS[kind](folder)
    assert _refused(tmp_path, lambda train: zeroamp.load_hf(train.model, folder))
