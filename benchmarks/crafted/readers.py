"""The readers of crafted files: the good folder of each, how it is read, and the values that it must read."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zeroamp
from benchmarks.crafted.checkpoints import STEP
from zeroamp.reporting.saved_runs import read_run, table
from zeroamp.reporting.step_record import StepRecord

CONFIG = {
    "train_batch_size": 1,
    "zero_optimization": {"stage": 3},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
}
ESCAPES = {chr(code) for code in (*range(32), 127)} - {"\n"}


def _build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    model.register_buffer("seen", torch.arange(3.0))
    return model


def _train(build: Callable[[], nn.Module] = _build) -> zeroamp.TrainStep:
    model = zeroamp.wrap_model(build(), zeroamp.policy_from_config(CONFIG, world_size=1))
    return zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: getattr(value, "full_tensor", lambda value=value: value)().detach().clone()  # type: ignore[misc]
            for name, value in model.state_dict().items()}  # fmt: skip


def _other(train: zeroamp.TrainStep) -> zeroamp.TrainStep:
    with torch.no_grad():
        for value in train.model.state_dict().values():
            value.fill_(7)
    return train


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def make_good(root: Path) -> None:
    """Make the good folder of every reader. Needs a process group of one rank."""
    train = _train()
    train.backward(train.model(torch.ones(2, 4)).float().sum())
    train.step()
    zeroamp.save_checkpoint(root / "checkpoints", train.model, train, extra={"position": 1})
    torch.save(_state(train.model), root / "expected.pt")
    (root / "hf").mkdir()
    save_file(_state(train.model), root / "hf" / "model.safetensors")
    (root / "reports").mkdir()
    header = {"kind": "header", "world_size": 1, "device": "cpu", "plan": {"mode": "fp32", "stage": 3}}
    known: dict[str, Any] = {"step": 1, "loss": 1.0, "grad_norm": 1.0}
    needed = {name: 0 for name, field in StepRecord.__dataclass_fields__.items() if field.type in (float, int, bool)}
    record = {"kind": "step", **{k: v for k, v in needed.items() if k not in known}, "lr": [0.1], **known}
    (root / "reports" / "run.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(record)}\n")
    (root / "configs").mkdir()
    (root / "configs" / "config.json").write_text(json.dumps(CONFIG))


def _expected(folder: Path) -> dict[str, torch.Tensor]:
    expected: dict[str, torch.Tensor] = torch.load(folder.parent / "expected.pt")
    return expected


def _load(folder: Path, path: Path) -> bool:
    train = _other(_train())
    zeroamp.load_checkpoint(path, train.model, train)
    return _same(_state(train.model), _expected(folder))


def _export(folder: Path) -> bool:
    zeroamp.export_checkpoint(folder / STEP, folder.parent / "out", "fp32")
    return _same(load_file(folder.parent / "out" / "model.safetensors"), _expected(folder))


def _latest(folder: Path) -> bool:
    return zeroamp.latest_checkpoint(folder) == folder / STEP


def _save(folder: Path) -> bool:
    train = _train()
    return _load(folder, folder) and zeroamp.save_checkpoint(folder, train.model, train, step=2).is_dir()


def _load_hf(folder: Path) -> bool:
    model = _other(_train()).model
    zeroamp.load_hf(model, folder)
    return _same(_state(model), _expected(folder))


def _report(folder: Path) -> bool:
    text = table([read_run(folder / "run.jsonl")])
    return "loss, last" in text and not ESCAPES & set(text)


def _policy(folder: Path) -> bool:
    zeroamp.policy_from_config(folder / "config.json", world_size=1)
    return True


@dataclass(frozen=True)
class Reader:
    """The name of a good folder, and a function that reads a folder and returns whether it has the good values."""

    good: str
    read: Callable[[Path], bool]


READERS = {
    "load_checkpoint": Reader("checkpoints", lambda folder: _load(folder, folder / STEP)),
    "load_newest": Reader("checkpoints", lambda folder: _load(folder, folder)),
    "export_checkpoint": Reader("checkpoints", _export),
    "latest_checkpoint": Reader("checkpoints", _latest),
    "save_checkpoint": Reader("checkpoints", _save),
    "load_hf": Reader("hf", _load_hf),
    "read_run": Reader("reports", _report),
    "policy_from_config": Reader("configs", _policy),
}
