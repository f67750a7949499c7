"""Tampered checkpoints of `save_checkpoint`. Their digests match, unless a wrong digest is the variant."""

import hashlib
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from benchmarks.crafted.variant import (
    BOMB_BYTES,
    Call,
    Storage,
    Variant,
    archive,
    doubled,
    dumps,
    harm,
    nested,
    put,
    saved,
    special,
    tensor,
)

STEP = "step_00000001"
WEIGHT = "model.0.weight"
SHAPE = (6, 4)
DATA = "__0_0.distcp"

Craft = Callable[[Path], None]


def rewrite_manifest(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the manifest, and correct its digest."""
    path = folder / STEP / "zeroamp.json"
    content = json.loads(path.read_text())
    content.pop("sha256")
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**content, "sha256": digest}))


def _record(folder: Path, name: str) -> None:
    content = (folder / STEP / name).read_bytes()
    record = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite_manifest(folder, lambda manifest: manifest["files"].update({name: record}))


def _file(name: str, content: bytes | str | Callable[[Path], bytes]) -> Craft:
    """Replace a file of the checkpoint, and correct the manifest."""

    def craft(folder: Path) -> None:
        made = content(folder) if callable(content) else content
        put(f"{STEP}/{name}", made)(folder)
        _record(folder, name)

    return craft


def _metadata(change: Callable[[Any], Any]) -> Craft:
    """Change the metadata in place, or replace it by the result of `change` unless that is None."""

    def craft(folder: Path) -> None:
        metadata = pickle.loads((folder / STEP / ".metadata").read_bytes())
        other = change(metadata)
        put(f"{STEP}/.metadata", pickle.dumps(metadata if other is None else other))(folder)
        _record(folder, ".metadata")

    return craft


def _of(metadata: Any) -> Any:
    entry = metadata.state_dict_metadata[WEIGHT]
    index = next(index for index in metadata.storage_data if index.fqn == WEIGHT)
    return SimpleNamespace(
        entry=entry, chunk=entry.chunks[0], index=index, info=metadata.storage_data[index], all=metadata
    )


def _set(what: str, name: str, value: Any) -> Craft:
    """Set a field of the weight's entry, chunk, or place in the file."""
    return _metadata(lambda metadata: object.__setattr__(getattr(_of(metadata), what), name, value))


def _chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Craft:
    """Save the weight in chunks (offsets, sizes), each at the place of the original chunk."""

    def change(metadata: Any) -> None:
        weight = _of(metadata)
        weight.entry.chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
        del metadata.storage_data[weight.index]
        for at, _ in boxes:
            metadata.storage_data[MetadataIndex(WEIGHT, torch.Size(at))] = weight.info

    return _metadata(change)


def _rename(metadata: Any, name: str) -> None:
    weight = _of(metadata)
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(WEIGHT)
    metadata.storage_data[MetadataIndex(name, weight.index.offset)] = metadata.storage_data.pop(weight.index)


def _as_bytes(metadata: Any) -> None:
    metadata.state_dict_metadata[WEIGHT] = BytesStorageMetadata()


_BUILD_ON_CLASS = (
    b"\x80\x04\x8c\x27torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93N}\x8c\x03foo\x8c\x03bars\x86b."
)

METADATA: dict[str, Craft] = {
    "a tensor without chunks": _set("entry", "chunks", []),
    "a chunk that covers half": _chunks(((0, 0), (3, 4))),
    "two chunks with a gap": _chunks(((0, 0), (2, 4)), ((3, 0), (3, 4))),
    "two chunks that overlap": _chunks(((0, 0), (4, 4)), ((2, 0), (4, 4))),
    "overlap and gap of equal volume": _chunks(((0, 0), (3, 4)), ((1, 0), (3, 4))),
    "the same chunk twice": _set("entry", "chunks", [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size(SHAPE))] * 2),
    "a chunk that begins outside": _chunks(((6, 0), SHAPE)),
    "a chunk that ends outside": _chunks(((1, 0), SHAPE)),
    "a chunk larger than its tensor": _chunks(((0, 0), (12, 4))),
    "a chunk of other dimensions": _chunks(((0,), (24,))),
    "a chunk of a hundred dimensions": _chunks(((0,) * 100, (1,) * 100)),
    "negative offset": _set("chunk", "offsets", (-1, 0)),
    "negative size": _set("chunk", "sizes", (-6, -4)),
    "sizes of NaN": _set("chunk", "sizes", (math.nan, 4)),
    "sizes of infinity": _set("entry", "size", (math.inf, 4)),
    "sizes of text": _set("entry", "size", ("6", "4")),
    "sizes that are booleans": _set("entry", "size", (True, True)),
    "no sizes": _set("entry", "size", None),
    "a shape of 2**62": _set("entry", "size", (2**62, 4)),
    "a shape of 2**80": _set("entry", "size", (2**80, 4)),
    "a shape and a chunk of 2**40 elements": _metadata(
        lambda m: (
            setattr(_of(m).entry, "size", torch.Size((2**38, 4))),
            setattr(_of(m).chunk, "sizes", torch.Size((2**38, 4))),
            None,
        )[-1]
    ),
    "another shape of as many elements": _metadata(
        lambda m: (
            setattr(_of(m).entry, "size", torch.Size((4, 6))),
            setattr(_of(m).chunk, "sizes", torch.Size((4, 6))),
            None,
        )[-1]
    ),
    "another dtype": _metadata(lambda m: setattr(_of(m).entry.properties, "dtype", torch.float64)),
    "a dtype that is text": _metadata(lambda m: setattr(_of(m).entry.properties, "dtype", "float32")),
    "a tensor declared as bytes": _metadata(_as_bytes),
    "a place of ../": _set("info", "relative_path", f"../{STEP}/{DATA}"),
    "a place of an absolute path": _set("info", "relative_path", "/etc/passwd"),
    "a place in a file that the manifest does not list": _set("info", "relative_path", "zeroamp.json"),
    "a place in a file of another kind": _set("info", "relative_path", "weights.json"),
    "a negative place": _set("info", "offset", -1),
    "a place beyond the end": _set("info", "offset", 10**12),
    "a place of no bytes": _set("info", "length", 0),
    "a place of 2**60 bytes": _set("info", "length", 2**60),
    "a place that is NaN": _set("info", "offset", math.nan),
    "a place elsewhere in the file": _set("info", "offset", 5),
    "a place with a transformation": _set("info", "transform_descriptors", ["zstd"]),
    "no place": _metadata(lambda m: m.storage_data.clear()),
    "storage_data None": _metadata(lambda m: setattr(m, "storage_data", None)),
    "tensors None": _metadata(lambda m: setattr(m, "state_dict_metadata", None)),
    "a renamed tensor": _metadata(lambda m: _rename(m, "model.other")),
    "a name with terminal escapes": _metadata(lambda m: _rename(m, "model.\x1b]0;owned\x07\x1b[31m")),
    "a name that is a number": _metadata(lambda m: m.state_dict_metadata.update({7: _of(m).entry})),
    "a list": _metadata(lambda _: [1, 2]),
    "a dict": _metadata(lambda _: {"a": 1}),
    "10,000 levels of lists": _file(".metadata", b"\x80\x04" + b"]" * 10_000 + b"a" * 9_999 + b"."),
    "a call": _file(".metadata", lambda folder: pickle.dumps(harm(folder))),
    "a call in place of a chunk": _metadata(lambda m: setattr(_of(m).entry, "chunks", Call(print, "x"))),
    "a dotted name": _file(".metadata", b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93\x8c\x04true\x85R."),
    "a dtype that is none": _file(".metadata", b"\x80\x04\x8c\x05torch\x8c\x07float33\x93."),
    "torch.load by name": _file(".metadata", b"\x80\x04\x8c\x05torch\x8c\x04load\x93\x8c\x01x\x85R."),
    "state set on a class": _file(".metadata", _BUILD_ON_CLASS),
    "9 bytes that remember 2**29 objects": _file(".metadata", b"\x80\x02}r\xff\xff\xff\x1f."),
    "text with 2**62 bytes": _file(".metadata", b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x."),
    "bytes with 2**33 bytes": _file(".metadata", b"\x80\x04\x8e" + (2**33).to_bytes(8, "little") + b"x."),
    "a bytearray with 2**33 bytes": _file(".metadata", b"\x80\x05\x96" + (2**33).to_bytes(8, "little") + b"x."),
    "a frame with 2**40 bytes": _file(".metadata", b"\x80\x04\x95" + (2**40).to_bytes(8, "little") + b"N."),
    "an extension": _file(".metadata", b"\x80\x02\x82\x01."),
    "an old instance": _file(".metadata", b"(ios\nsystem\n."),
    "a persistent id": _file(".metadata", b"\x80\x02K\x01Q."),
    "nothing": _file(".metadata", b""),
    "garbage": _file(".metadata", b"garbage"),
    "half of it": _file(".metadata", lambda folder: (folder / STEP / ".metadata").read_bytes()[:500]),
}


_FLOATS = b"\0" * (4 * math.prod(SHAPE))
_OF_SHAPE = tensor(Storage(math.prod(SHAPE)), *SHAPE)


def _directory_twice() -> bytes:
    """Return an archive that is small for one reader of zip files, and a bomb for another."""
    small, bomb = archive(_OF_SHAPE, {"0": _FLOATS}), _bomb()
    return bomb[:-22] + small + bomb[-22:]


def _bomb(num_bytes: int = BOMB_BYTES // 4) -> bytes:
    return archive(tensor(Storage(num_bytes // 4), num_bytes // 4), {"0": b"\0" * num_bytes}, compressed=True)


def _pickle_bomb() -> bytes:
    return archive(b"\x80\x02X" + (2**28).to_bytes(4, "little") + b"x" * 2**28 + b".", compressed=True)


def _overlapping() -> bytes:
    """Return an archive with many records that share the same bytes."""
    content = bytearray(archive(_OF_SHAPE, {"0": _FLOATS, **{str(key): b"" for key in range(1, 40)}}))
    return bytes(content).replace(b"archive/data/1", b"archive/data/0")


def _chain() -> Any:
    return Call(torch._tensor._rebuild_from_type_v2, torch.FloatTensor, torch.Tensor, (BOMB_BYTES // 4,), {})


ARCHIVES: dict[str, Callable[[Path], bytes]] = {
    "a call": lambda folder: archive(harm(folder)),
    "a call, as a plain pickle": lambda folder: pickle.dumps(harm(folder)),
    "the old format of torch.save": lambda _: _legacy(),
    "a deflate bomb of 256 MiB": lambda _: _bomb(),
    "a deflate bomb in the pickle": lambda _: _pickle_bomb(),
    "compressed records": lambda _: archive(_OF_SHAPE, {"0": _FLOATS}, compressed=True),
    "a storage longer than its record": lambda _: archive(tensor(Storage(2**30), 2**30), {"0": _FLOATS}),
    "a storage shorter than its record": lambda _: archive(tensor(Storage(4), 4), {"0": _FLOATS}),
    "a storage without a record": lambda _: archive(_OF_SHAPE),
    "a tensor beyond its storage": lambda _: archive(tensor(Storage(24), 48), {"0": _FLOATS}),
    "a tensor of negative stride": lambda _: archive(tensor(Storage(24), 6, 4, stride=(-4, 1)), {"0": _FLOATS}),
    "a tensor expanded to 2**40 elements": lambda _: archive(
        tensor(Storage(24), 2**20, 2**20, stride=(0, 0)), {"0": _FLOATS}
    ),
    "a call of bytearray(2**30)": lambda _: archive(Call(bytearray, BOMB_BYTES)),
    "a call of FloatTensor(2**28)": lambda _: archive(Call(torch.FloatTensor, BOMB_BYTES // 4)),
    "a call of UntypedStorage(2**30)": lambda _: archive(Call(torch.UntypedStorage, BOMB_BYTES)),
    "such a call by a rebuild function": lambda _: archive(_chain()),
    "a persistent id that is none": lambda _: archive(b"\x80\x02K\x01Q."),
    "two directories": lambda _: _directory_twice(),
    "records that overlap": lambda _: _overlapping(),
    "a comment": lambda _: archive(_OF_SHAPE, {"0": _FLOATS})[:-2] + b"\x04\x00abcd",
    "two pickles": lambda _: archive(_OF_SHAPE, {"0": _FLOATS}, more={"other/data.pkl": dumps([])}),
    "no pickle": lambda _: _without_pickle(),
    "a TorchScript archive": lambda _: archive(_OF_SHAPE, {"0": _FLOATS}, more={"archive/constants.pkl": dumps([])}),
    "half of it": lambda _: archive(_OF_SHAPE, {"0": _FLOATS})[:200],
    "nothing": lambda _: b"",
    "a dict": lambda _: archive({"a": 1}),
    "lists in 100,000 levels": lambda _: archive(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."),
}


def _without_pickle() -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("archive/version", b"3\n")
    return file.getvalue()


def _legacy() -> bytes:
    file = BytesIO()
    torch.save(torch.zeros(SHAPE), file, _use_new_zipfile_serialization=False)
    return file.getvalue()


CHUNKS: dict[str, Callable[[Path], bytes]] = {
    **ARCHIVES,
    "a tensor of another shape": lambda _: saved(torch.zeros(4, 6)),
    "a larger tensor": lambda _: saved(torch.zeros(12, 4)),
    "a tensor of another dtype": lambda _: saved(torch.zeros(SHAPE, dtype=torch.float64)),
    "a tensor of integers": lambda _: saved(torch.zeros(SHAPE, dtype=torch.int32)),
    "a sparse tensor": lambda _: saved(torch.zeros(SHAPE).to_sparse()),
    "a tensor on the meta device": lambda _: saved(torch.zeros(SHAPE, device="meta")),
    "a tensor in a list": lambda _: saved([torch.zeros(SHAPE)]),
}


def chunk(make: Callable[[Path], bytes]) -> Craft:
    """Replace the bytes of the weight's chunk by others at the end of the file."""

    def craft(folder: Path) -> None:
        path, content = folder / STEP / DATA, make(folder)
        start = path.stat().st_size
        with path.open("ab") as file:
            file.write(content)
        _record(folder, DATA)

        def move(metadata: Any) -> None:
            info = _of(metadata).info
            info.offset, info.length = start, len(content)

        _metadata(move)(folder)

    return craft


def _values(name: str, change: Callable[[Any, Path], Any]) -> Craft:
    """Change the content of `train.pt` or of a rank's file in place, or replace it by the result of `change`."""

    def make(folder: Path) -> bytes:
        values = torch.load(folder / STEP / name, weights_only=True)
        other = change(values, folder)
        return saved(values if other is None else other)

    return _file(name, make)


RANK, TRAIN = "rank_00000.pt", "train.pt"
_VALUES: dict[str, Craft] = {
    "train.pt: a list": _values(TRAIN, lambda *_: [1]),
    "train.pt: empty": _values(TRAIN, lambda *_: {}),
    "train.pt: a call": _values(TRAIN, lambda _, folder: {"train": harm(folder)}),
    "train.pt: state of a parameter that is none": _values(
        TRAIN, lambda v, _: v["optimizer"][0]["state"].update(none={"exp_avg": "sharded"})
    ),
    "train.pt: state that is a number": _values(TRAIN, lambda v, _: v["optimizer"][0].update(state=3)),
    "train.pt: another optimizer": _values(TRAIN, lambda v, _: v["optimizer"][0].update({"class": "SGD"})),
    "train.pt: no param groups": _values(TRAIN, lambda v, _: v["optimizer"][0].update(groups=[])),
    "train.pt: a scheduler": _values(TRAIN, lambda v, _: v.update(scheduler=[{"class": "X", "state": {}}])),
    "train.pt: an optimizer more": _values(TRAIN, lambda v, _: v["optimizer"].append(v["optimizer"][0])),
    "train.pt: optimizers that are numbers": _values(TRAIN, lambda v, _: v.update(optimizer=[3])),
    "train.pt: no list of optimizers": _values(TRAIN, lambda v, _: v.update(optimizer=3)),
    "train.pt: no schedulers": _values(TRAIN, lambda v, _: v.update(scheduler=[])),
    "train.pt: counts that are text": _values(TRAIN, lambda v, _: v.update(train="many")),
    "rank: a list": _values(RANK, lambda *_: [1]),
    "rank: a call in extra": _values(RANK, lambda v, folder: v.update(extra=harm(folder))),
    "rank: a buffer of another shape": _values(RANK, lambda v, _: v["tensors"].update({"model.seen": torch.zeros(1)})),
    "rank: a buffer of another dtype": _values(
        RANK, lambda v, _: v["tensors"].update({"model.seen": torch.zeros(3, dtype=torch.float64)})
    ),
    "rank: a buffer that the model does not have": _values(
        RANK, lambda v, _: v["tensors"].update({"model.none": torch.zeros(3)})
    ),
    "rank: a buffer that is text": _values(RANK, lambda v, _: v["tensors"].update({"model.seen": "x"})),
    "rank: a buffer expanded to 2**40 elements": _values(
        RANK, lambda v, _: v["tensors"].update({"model.seen": torch.zeros(1).expand(2**40)})
    ),
}
_LOAD_ONLY: dict[str, Craft] = {
    "rank: an extra state of no module": _values(RANK, lambda v, _: v["extra_states"].update(none=1)),
    "rank: extra states that are a list": _values(RANK, lambda v, _: v.update(extra_states=[1])),
    "rank: a random state of 3 bytes": _values(
        RANK, lambda v, _: v.update(random={key: torch.zeros(3, dtype=torch.uint8) for key in v["random"]})
    ),
}


def _manifest(change: Callable[[Any], Any]) -> Craft:
    return lambda folder: rewrite_manifest(folder, change)


_RECORD = {"num_bytes": 1, "sha256": "0" * 64}
MANIFESTS: dict[str, Craft] = {
    "a FIFO": special(f"{STEP}/zeroamp.json", "fifo"),
    "a socket": special(f"{STEP}/zeroamp.json", "socket"),
    "a device": special(f"{STEP}/zeroamp.json", "device"),
    "a folder": special(f"{STEP}/zeroamp.json", "folder"),
    "nothing": special(f"{STEP}/zeroamp.json", "empty"),
    "half of it": special(f"{STEP}/zeroamp.json", "cut"),
    "100,000 levels": put(f"{STEP}/zeroamp.json", "[" * 100_000),
    "100,000 levels of objects": put(f"{STEP}/zeroamp.json", '{"a":' * 100_000),
    "40 MiB": put(f"{STEP}/zeroamp.json", b'{"a": "' + b"x" * 40 * 1024**2 + b'"}'),
    "no UTF-8": put(f"{STEP}/zeroamp.json", b"\xff\xfe{}"),
    "a key twice": lambda folder: put(
        f"{STEP}/zeroamp.json",
        (folder / STEP / "zeroamp.json").read_text().replace('"step"', '"step": 7, "step"', 1),
    )(folder),
    "a file of ../": _manifest(lambda m: m["files"].update({"../x": _RECORD})),
    "a file of an absolute path": _manifest(lambda m: m["files"].update({"/etc/passwd": _RECORD})),
    "a file with a line break": _manifest(lambda m: m["files"].update({"a\nb": _RECORD})),
    "a file that is not there": _manifest(lambda m: m["files"].update({"x": _RECORD})),
    "a file less": _manifest(lambda m: m["files"].pop(DATA)),
    "no files": _manifest(lambda m: m.update(files={})),
    "a negative number of bytes": _manifest(lambda m: m["files"][DATA].update(num_bytes=-1)),
    "a number of bytes that is NaN": _manifest(lambda m: m["files"][DATA].update(num_bytes=math.nan)),
    "another digest of a file": _manifest(lambda m: m["files"][DATA].update(sha256="0" * 64)),
    "an unknown key with terminal escapes": _manifest(lambda m: m.update({"\x1b[31mred": 1})),
    "a serial of 2**70": _manifest(lambda m: m.update(serial="9" * 30)),
    "another format": _manifest(lambda m: m.update(format=2)),
}
FILES: dict[str, Craft] = {
    f"{name}: {kind}": special(f"{STEP}/{name}", kind)
    for name in (".metadata", DATA, TRAIN, RANK, "weights.json")
    for kind in ("fifo", "link out", "folder", "gone")
}
EXPORTS: dict[str, Craft] = {
    "weights.json: a list of lists": _file("weights.json", "[[]]"),
    "weights.json: an object": _file("weights.json", '{"a": 1}'),
    "weights.json: 100,000 levels": _file("weights.json", "[" * 100_000),
    "weights.json: a tensor less": _file("weights.json", lambda f: json.dumps(_weights(f)[1:]).encode()),
    "weights.json: a tensor twice": _file("weights.json", lambda f: json.dumps(_weights(f) * 2).encode()),
    "weights.json: two tensors of one name": _file(
        "weights.json", lambda f: json.dumps([{**w, "written": ["x"]} for w in _weights(f)]).encode()
    ),
    "weights.json: names as text": _file(
        "weights.json", lambda f: json.dumps([{**w, "written": w["saved"]} for w in _weights(f)]).encode()
    ),
    "weights.json: a tensor that is not saved": _file(
        "weights.json",
        lambda f: json.dumps([*_weights(f), {"saved": "x", "written": ["x"], "is_parameter": True}]).encode(),
    ),
    "config.json: a list": lambda f: (put(f"{STEP}/config.json", "[]")(f), _record(f, "config.json"), None)[-1],
    "config.json: 100,000 levels": lambda f: (
        put(f"{STEP}/config.json", "[" * 100_000)(f),
        _record(f, "config.json"),
        None,
    )[-1],
    "a config that is none": _manifest(lambda m: m.update(config={"zero_optimization": {"stage": 9}})),
}


def _weights(folder: Path) -> list[dict[str, Any]]:
    weights: list[dict[str, Any]] = json.loads((folder / STEP / "weights.json").read_text())
    return weights


POINTERS: dict[str, Craft] = {
    "latest: a FIFO": special("latest", "fifo"),
    "latest: a socket": special("latest", "socket"),
    "latest: a device": special("latest", "device"),
    "latest: a folder": special("latest", "folder"),
    "latest: 10 MB": put("latest", b"x " * 5_000_000),
    "latest: a path": put("latest", f"1 ../{STEP} 0"),
    "latest: terminal escapes": put("latest", "1 \x1b[31m 0"),
    "latest: a number of 5,000 digits": put("latest", f"{'9' * 5000} x {'9' * 5000}"),
    "a file .draft-x": put(".draft-x", "x"),
    "a FIFO .draft-x": special(".draft-x", "fifo"),
    "a folder .latest-x": lambda folder: (folder / ".latest-x").mkdir(),
    "a file .removed-x": put(".removed-x", "x"),
    "a file step_00000009": put("step_00000009", "x"),
    "a FIFO step_00000009": special("step_00000009", "fifo"),
    "a link step_00000002 that leads nowhere": lambda folder: (folder / "step_00000002").symlink_to("nowhere"),
    "a checkpoint with a FIFO beside a good one": lambda folder: (
        (folder / "step_00000009").mkdir(),
        special("step_00000009/zeroamp.json", "fifo")(folder),
        None,
    )[-1],
}


def variants() -> Iterator[Variant]:
    """Yield all variants of checkpoints."""
    for reader in ("load_checkpoint", "export_checkpoint"):
        for name, craft in (METADATA | FILES).items():
            yield Variant(reader=reader, name=f".metadata: {name}" if name in METADATA else name, craft=craft)
        for name, craft in MANIFESTS.items():
            yield Variant(reader=reader, name=f"zeroamp.json: {name}", craft=craft)
        for name, make in CHUNKS.items():
            yield Variant(reader=reader, name=f"chunk: {name}", craft=chunk(make))
    for name, make in ARCHIVES.items():
        if name != "a dict":
            yield Variant(reader="load_checkpoint", name=f"train.pt: archive with {name}", craft=_file(TRAIN, make))
            yield Variant(reader="export_checkpoint", name=f"rank: archive with {name}", craft=_file(RANK, make))
    for name, craft in (_VALUES | _LOAD_ONLY).items():
        yield Variant(reader="load_checkpoint", name=name, craft=craft)
    for name, craft in EXPORTS.items():
        yield Variant(reader="export_checkpoint", name=name, craft=craft)
    for reader in ("latest_checkpoint", "load_newest", "save_checkpoint"):
        for name, craft in POINTERS.items():
            is_in_the_way = (reader, name) == ("save_checkpoint", "latest: a folder")  # what a rename cannot replace
            yield Variant(reader=reader, name=name, craft=craft, ends="refused" if is_in_the_way else "harmless")
    yield Variant(
        reader="load_checkpoint",
        name="values that no repr should print",
        craft=_values(TRAIN, lambda v, _: v["optimizer"][0].update(state=doubled(40))),
    )
    yield Variant(
        reader="load_checkpoint",
        name="100 levels in extra",
        craft=_values(RANK, lambda v, _: v.update(extra=nested(100))),
        ends="harmless",
    )
