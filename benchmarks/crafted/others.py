"""Crafted safetensors, run reports and configs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.crafted.variant import (
    Variant,
    archive,
    harm,
    put,
    special,
)

Craft = Callable[[Path], None]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NAMES = ("0.weight", "0.bias", "1.weight", "1.bias", "seen")


def safetensors(header: Any, num_bytes: int = 256) -> bytes:
    """Return a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * num_bytes


def _index(**files: Any) -> Craft:
    return put(INDEX, json.dumps({"weight_map": {**dict.fromkeys(NAMES, SINGLE), **files}}))


def _elsewhere(folder: Path) -> None:
    (folder / SINGLE).rename(folder.parent / "elsewhere.safetensors")


def _with(change: Callable[[dict[str, torch.Tensor]], Any]) -> Craft:
    def craft(folder: Path) -> None:
        from safetensors.torch import load_file

        tensors = load_file(folder / SINGLE)
        change(tensors)
        save_file(tensors, folder / SINGLE)

    return craft


def _hub(folder: Path) -> None:
    """Make the folder a link into a hub's cache: repository/snapshots/revision, with links to repository/blobs."""
    repository = folder.parent / "repository"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / "revision")
    folder.symlink_to(repository / "snapshots" / "revision")
    (folder / SINGLE).rename(repository / "blobs" / "0a1b")
    (repository / "snapshots" / "revision" / SINGLE).symlink_to("../../blobs/0a1b")


_ENTRY = {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]}
_HEADERS: dict[str, Any] = {
    "a header of 2**60 bytes": (2**60).to_bytes(8, "little") + b"{}",
    "a header of 10,000 levels": safetensors(b'{"a":' * 10_000),
    "a header that is a list": safetensors([]),
    "no header": b"\0" * 4,
    "a shape of 2**62": safetensors({"0.weight": {**_ENTRY, "shape": [2**62, 4]}}),
    "a negative shape": safetensors({"0.weight": {**_ENTRY, "shape": [-6, -4]}}),
    "a shape of NaN": safetensors(b'{"0.weight": {"dtype": "F32", "shape": [NaN, 4], "data_offsets": [0, 96]}}'),
    "another dtype name": safetensors({"0.weight": {**_ENTRY, "dtype": "F33"}}),
    "offsets that run back": safetensors({"0.weight": {**_ENTRY, "data_offsets": [96, 0]}}),
    "offsets beyond the end": safetensors({"0.weight": {**_ENTRY, "data_offsets": [10**9, 10**9 + 96]}}),
    "offsets that overlap": safetensors(dict.fromkeys(NAMES, _ENTRY)),
    "a shape of more bytes than its offsets": safetensors({"0.weight": {**_ENTRY, "shape": [60, 4]}}),
    "a name twice": safetensors(
        b'{"0.weight": {"dtype": "F32", "shape": [6, 4], "data_offsets": [0, 96]}, '
        b'"0.weight": {"dtype": "F32", "shape": [6, 4], "data_offsets": [96, 192]}}'
    ),
    "a name with terminal escapes": safetensors({"\x1b[31m": _ENTRY}, 96),
}
_HF: dict[str, Craft] = {
    **{name: put(SINGLE, content) for name, content in _HEADERS.items()},
    **{
        f"the file: {kind}": special(SINGLE, kind) for kind in ("fifo", "socket", "device", "folder", "link out", "cut")
    },
    **{f"the index: {kind}": special(INDEX, kind) for kind in ("fifo", "socket", "device", "folder", "empty")},
    "an index of ../": lambda f: (_elsewhere(f), _index(**dict.fromkeys(NAMES, "../elsewhere.safetensors"))(f), None)[
        -1
    ],
    "an index of an absolute path": lambda f: (
        _elsewhere(f),
        _index(**dict.fromkeys(NAMES, str(f.parent / "elsewhere.safetensors")))(f),
        None,
    )[-1],
    "an index of a/../..": _index(seen="a/../../elsewhere.safetensors"),
    "an index with a number for a file": _index(seen=7),
    "an index with a file of another tensor": _index(other=SINGLE),
    "an index with a file that is not there": _index(seen="x.safetensors"),
    "an index of 100,000 levels": put(INDEX, '{"weight_map":' * 100_000),
    "an index of 40 MiB": put(INDEX, b'{"weight_map": {"a": "' + b"x" * 40 * 1024**2 + b'"}}'),
    "an index with a key twice": put(INDEX, '{"weight_map": {}, "weight_map": {}}'),
    "an index with terminal escapes": _index(seen="\x1b[31m.safetensors"),
    "float64 beyond float32": _with(lambda t: t.update({"0.weight": torch.full((6, 4), 1e300, dtype=torch.float64)})),
    "another shape": _with(lambda t: t.update({"0.weight": torch.zeros(4, 6)})),
    "integers for numbers": _with(lambda t: t.update({"0.weight": torch.zeros(6, 4, dtype=torch.int32)})),
    "a pickle instead": lambda f: (
        (f / SINGLE).unlink(),
        (f / "pytorch_model.bin").write_bytes(archive(harm(f))),
        None,
    )[-1],
}

_STEP = {"kind": "step", "step": 1, "loss": 1.0, "grad_norm": 1.0}
_REPORTS: dict[str, Craft] = {
    **{kind: special("run.jsonl", kind) for kind in ("fifo", "socket", "device", "folder", "empty", "gone")},
    "100,000 levels": put("run.jsonl", "[" * 100_000),
    "100,000 levels of objects": put("run.jsonl", '{"kind":' * 100_000),
    "a line of 100 MiB": put("run.jsonl", b"x" * 100 * 1024**2),
    "no header": put("run.jsonl", json.dumps(_STEP)),
    "a header that is a list": put("run.jsonl", "[1]"),
    "a plan that is a list": put("run.jsonl", '{"kind": "header", "plan": [1]}'),
}
_READ_REPORTS: dict[str, Callable[[list[str]], list[str]]] = {
    "terminal escapes": lambda lines: [
        json.dumps({**json.loads(lines[0]), "device": "\x1b]0;owned\x07", "plan": {"mode": "\x1b[31m"}}),
        *lines[1:],
        json.dumps({"kind": "warning", "name": "\x1b[2J", "text": "\x1b[2J"}),
    ],
    "integers of 4,000 digits": lambda lines: [*lines, lines[-1].replace('"loss": 1.0', f'"loss": {"9" * 4000}')],
    "bytes of 4,000 digits": lambda lines: [*lines, _step(lines, traffic_bytes={"x": 10**4000})],
    "a step that is nested": lambda lines: [*lines, _step(lines, lr=[[1]])],
    "a line that is cut": lambda lines: [*lines, lines[-1][:20]],
    "lines that are none": lambda lines: [*lines, "[" * 100_000, "\0" * 1000, "null", "3"],
}


def _step(lines: list[str], **values: Any) -> str:
    return json.dumps({**json.loads(lines[-1]), **values})


def _report(change: Callable[[list[str]], list[str]]) -> Craft:
    def craft(folder: Path) -> None:
        path = folder / "run.jsonl"
        path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")

    return craft


def _config(text: str | bytes) -> Craft:
    return put("config.json", text)


_CONFIGS: dict[str, Craft] = {
    **{kind: special("config.json", kind) for kind in ("fifo", "socket", "device", "folder", "empty", "gone", "cut")},
    "100,000 levels": _config("[" * 100_000),
    "100,000 levels of objects": _config('{"a":' * 100_000),
    "100 levels of objects": _config('{"a":' * 100 + "1" + "}" * 100),
    "40 MiB": _config(b'{"a": "' + b"x" * 40 * 1024**2 + b'"}'),
    "a key twice": _config('{"gradient_clipping": 1, "gradient_clipping": 2}'),
    "a key with terminal escapes": _config('{"\\u001b]0;owned\\u0007": 1}'),
    "an inner key with terminal escapes": _config('{"zero_optimization": {"\\u001b[31m": 1}}'),
    "a value with terminal escapes": _config('{"fp16": {"enabled": "\\u001b[31m"}}'),
    "1e19 elements": _config('{"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e19}}'),
    "1e308 elements": _config('{"zero_optimization": {"stage": 3, "reduce_bucket_size": 1e308}}'),
    "an integer of 5,000 digits": _config(f'{{"train_batch_size": {"9" * 5000}}}'),
    "an integer of 100 bits": _config(f'{{"train_batch_size": {2**100}}}'),
    "NaN": _config('{"gradient_clipping": NaN}'),
    "infinity": _config('{"gradient_clipping": Infinity}'),
    "half of a surrogate pair": _config('{"\\ud800": 1}'),
    "1e308 steps of a cycle": _config(
        '{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, '
        '"cycle_first_step_size": 1e308}}}'
    ),
    "5e-324 steps of a cycle": _config(
        '{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, '
        '"cycle_first_step_size": 5e-324}}}'
    ),
    "a learning rate of 1e308": _config('{"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e308}}}'),
    "no UTF-8": _config(b"\xff\xfe{}"),
}


def variants() -> Iterator[Variant]:
    """Yield all variants except those of zeroamp's checkpoints."""
    for reader, crafts in (
        ("load_hf", _HF),
        ("read_run", _REPORTS),
        ("policy_from_config", _CONFIGS),
    ):
        for name, craft in crafts.items():
            yield Variant(reader=reader, name=name, craft=craft)
    for name, change in _READ_REPORTS.items():
        yield Variant(reader="read_run", name=name, craft=_report(change), ends="harmless")
    yield Variant(reader="load_hf", name="links of a hub's cache", craft=_hub, ends="harmless")
    yield Variant(
        reader="load_hf",
        name="float64 within float32",
        craft=_with(lambda t: t.update({"0.weight": t["0.weight"].double()})),
        ends="harmless",
    )
