"""Which tensor is in which file, and what happens to a folder. No ranks."""

import json
import os
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import zeroamp
from zeroamp.weights.files import INDEX, TensorSpec, plan_files, publish, read_index, write_files, write_index

KILO = 1000


def specs(*sizes_in_kb):
    return [
        TensorSpec(name=f"t{i}", shape=(size * KILO // 4,), dtype=torch.float32) for i, size in enumerate(sizes_in_kb)
    ]


def names(files):
    return [[spec.name for spec in file.tensors] for file in files]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((), [[]]),
        ((1, 2, 3), [["t0", "t1", "t2"]]),
        ((4, 4, 2), [["t0", "t1", "t2"]]),  # full to the last byte
        ((4, 4, 3), [["t0", "t1"], ["t2"]]),
        ((1, 30, 1), [["t0"], ["t1"], ["t2"]]),  # one that is larger than a file
        ((30,), [["t0"]]),
    ],
)
def test_files_are_filled_in_order_up_to_their_size(sizes, expected):
    files = plan_files(specs(*sizes), 10 * KILO)
    assert names(files) == expected
    assert [file.num_bytes for file in files] == [KILO * sum(sizes[int(n[1:])] for n in part) for part in expected]


def test_the_names_are_those_that_transformers_reads():
    assert [file.name for file in plan_files(specs(1), 10)] == ["model.safetensors"]
    assert [file.name for file in plan_files(specs(1, 1), KILO)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "5GB", None])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(zeroamp.CheckpointError, match=f"max_shard_bytes .*{re.escape(repr(size))}.*5 GB"):
        plan_files(specs(1), size)


def test_one_process_writes_file_by_file_and_reads_tensor_by_tensor(tmp_path):
    asked = []

    def read(spec):
        asked.append(spec.name)
        return torch.full(spec.shape, float(spec.name[1:]))

    files = plan_files(specs(4, 4, 4, 1), 8 * KILO)
    for file in files:
        write_files([file], read, tmp_path)
    write_index(files, tmp_path)
    assert asked == ["t0", "t1", "t2", "t3"]
    for name, path in read_index(tmp_path / INDEX).items():
        with safe_open(tmp_path / path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert torch.equal(file.get_tensor(name), torch.full_like(file.get_tensor(name), float(name[1:])))
    assert json.loads((tmp_path / INDEX).read_text())["metadata"] == {"total_size": 13 * KILO}


def test_only_my_file_is_written_though_all_are_read(tmp_path):
    files = plan_files(specs(4, 4, 4), 4 * KILO)
    write_files(files, lambda spec: torch.zeros(spec.shape), tmp_path, mine=1)
    assert [path.name for path in tmp_path.iterdir()] == ["model-00002-of-00003.safetensors"]
    assert load_file(tmp_path / "model-00002-of-00003.safetensors").keys() == {"t1"}


def test_who_may_read_the_folder_may_read_its_files(tmp_path):
    tmp_path.chmod(0o750)
    files = plan_files(specs(1), KILO)
    write_files(files, lambda spec: torch.zeros(spec.shape), tmp_path)
    assert (tmp_path / files[0].name).stat().st_mode & 0o777 == 0o640


def _draft(folder, *file_names):
    folder.mkdir(parents=True)
    for name in file_names:
        (folder / name).write_text("new")
    return folder


def test_a_new_folder_appears_by_one_rename(tmp_path):
    publish(_draft(tmp_path / ".draft", "model.safetensors", "config.json"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "model.safetensors", "out"]


def test_old_weights_go_and_all_else_stays(tmp_path):
    stale = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX, "model.safetensors"]
    for name in (*stale, "tokenizer.json", "config.json", "model-lora.safetensors"):
        (tmp_path / name).write_text("old")
    publish(_draft(tmp_path / ".draft", "model.safetensors", "config.json"), tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "model.safetensors": "new",
        "config.json": "new",
        "tokenizer.json": "old",
        "model-lora.safetensors": "old",
    }


def test_no_moment_has_weights_of_two_exports(tmp_path, monkeypatch):
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX, "config.json"):
        (tmp_path / name).write_text("old")
    draft = _draft(tmp_path / ".draft", "config.json", INDEX, *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)))
    moved, replace = [], os.replace

    def look(source, target):
        weights = {path.read_text() for path in tmp_path.glob("model*")}
        assert weights <= {"new"}
        moved.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    publish(draft, tmp_path)
    assert moved[-2:] == [INDEX, "config.json"]


def test_a_draft_that_cannot_be_moved_is_named_and_kept(tmp_path):
    draft = _draft(tmp_path / ".draft", "model.safetensors")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "by someone else").touch()
    with pytest.raises(zeroamp.CheckpointError, match=re.escape(f"in {str(draft)!r}: move")):
        publish(draft, tmp_path / "out")
    assert (draft / "model.safetensors").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(zeroamp.CheckpointError, match=f"{INDEX} .*Get the file again"):
        read_index(tmp_path / INDEX)
