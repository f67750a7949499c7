"""`export_checkpoint`: without ranks and model, the same files as `export_hf` writes with them."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped
from tests.selection import slow_but
from zeroamp.cli.app import app

pytest.importorskip("safetensors", reason="the files are safetensors")


def _save_and_export(folder, name, dtypes, options, value):
    cfg = config(3)
    if name == "hf_llama":
        cfg["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    model = wrapped(name, cfg)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    train.backward(loss_of(model, batch(name, 0)))
    train.step()
    if value is not None:
        with torch.no_grad():
            next(model.parameters()).fill_(value)
    zeroamp.save_checkpoint(folder / "checkpoints", model, train)
    for dtype in dtypes:
        zeroamp.export_hf(model, folder / f"ranks-{dtype}", dtype, **options)


def _contents(folder):
    return {
        name: json.loads((folder / name).read_text()) if name.endswith(".json") else (folder / name).read_bytes()
        for name in os.listdir(folder)
    }


@pytest.mark.parametrize("name", slow_but(["hf_llama", "llama_tied", "conv"], "hf_llama", "llama_tied"))
@pytest.mark.parametrize(
    "options", slow_but([{}, {"max_shard_bytes": 9000}], {"max_shard_bytes": 9000}), ids=["one file", "several"]
)
def test_the_files_are_those_of_the_ranks(ranks2, tmp_path, name, options):
    if name == "hf_llama":
        pytest.importorskip("transformers", reason="the model is transformers'")
    dtypes = [None, "fp32", "bf16", "fp16"]
    ranks2.run(_save_and_export, tmp_path, name, dtypes, options, None)
    for dtype in dtypes:
        taken = zeroamp.export_checkpoint(tmp_path / "checkpoints", tmp_path / "alone", dtype, **options)
        assert taken.name == "step_00000001"
        assert _contents(tmp_path / "alone") == _contents(tmp_path / f"ranks-{dtype}")
    assert not [path for path in os.listdir(tmp_path) if "draft" in path]


def test_values_that_fp16_does_not_hold_and_damaged_files_are_refused(ranks2, tmp_path):
    ranks2.run(_save_and_export, tmp_path, "llama_tied", [], {}, 1e6)
    with pytest.raises(zeroamp.CheckpointError, match=r"magnitude 1e\+06.* 65504.*Export in fp32"):
        zeroamp.export_checkpoint(tmp_path / "checkpoints", tmp_path / "out", "fp16")
    assert os.listdir(tmp_path) == ["checkpoints"]
    with (tmp_path / "checkpoints" / "step_00000001" / "__1_0.distcp").open("r+b") as file:
        file.seek(100)
        file.write(b"!")
    with pytest.raises(zeroamp.CheckpointError, match="__1_0.distcp is damaged: sha256"):
        zeroamp.export_checkpoint(tmp_path / "checkpoints" / "step_00000001", tmp_path / "out")


def test_the_command(ranks2, tmp_path):
    ranks2.run(_save_and_export, tmp_path, "llama_tied", ["bf16"], {}, None)
    out = tmp_path / "out"
    command = ["export", tmp_path / "checkpoints", out, "--dtype", "bf16"]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{tmp_path / 'checkpoints' / 'step_00000001'} -> {out}\n"
    assert _contents(out) == _contents(tmp_path / "ranks-bf16")
    result = CliRunner().invoke(app, ["export", str(tmp_path), str(out)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: {tmp_path} ")
    assert "holds no checkpoint" in result.stderr


def _buffers(folder):
    model = wrapped("llama_tied", config(3))
    shared = torch.full((3,), float(dist.get_rank()))
    model.register_buffer("seen", shared)
    model.blocks[0].register_buffer("seen", shared)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    zeroamp.save_checkpoint(folder / "checkpoints", model, train)
    zeroamp.export_hf(model, folder / "ranks")
    with pytest.raises(zeroamp.CheckpointError, match="step_00000000: it is a checkpoint"):
        zeroamp.export_hf(model, folder / "checkpoints" / "step_00000000")


def test_buffers_are_the_first_ranks_and_shared_ones_have_all_names(ranks2, tmp_path):
    ranks2.run(_buffers, tmp_path)
    zeroamp.export_checkpoint(tmp_path / "checkpoints", tmp_path / "alone")
    assert _contents(tmp_path / "alone") == _contents(tmp_path / "ranks")
    path = tmp_path / "checkpoints" / "step_00000000"
    with pytest.raises(zeroamp.CheckpointError, match="it is a checkpoint"):
        zeroamp.export_checkpoint(path, path)
