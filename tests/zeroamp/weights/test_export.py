"""`export_hf`: what comes back out of the files is what the shards hold, bit for bit."""

import json
import os
import sys
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zeroamp
from tests.models.architectures import seeded_conv_net
from tests.models.small import batch, build, hf_llama, loss_of
from tests.processes.training import check_same_run, config, full_parameters, mesh_of, policy, same_bits, train, wrapped
from tests.selection import slow_but

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AUTOCAST_16 = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}


def _export_llama(folder, tied, stage, dtype, mesh_shape=None, fields=None, **options):
    model = zeroamp.wrap_model(hf_llama(tied), policy(config(stage), fields), mesh_of(mesh_shape))
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    step.backward(loss_of(model, batch("hf_llama", 0)))
    step.step()
    parameters = full_parameters(model)
    loss_of(model, batch("hf_llama", 1))  # leaves what this stage keeps for a backward gathered
    zeroamp.export_hf(model, folder, dtype, **options)
    return parameters


def check_llama(folder, parameters, tied, dtype):
    from transformers import AutoModelForCausalLM

    names = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
    assert "model.embed_tokens.weight" in names
    assert ("lm_head.weight" in names) != tied
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert same_bits(full_parameters(model), {name: p.to(dtype) for name, p in parameters.items()}) == []


ON_CPU = {"offload": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("tied", "stage", "dtype", "fields"),
    [(False, 3, "bf16", ON_CPU), (False, 1, "fp32", {}), (True, 0, torch.float16, {})],
)
def test_a_llama_comes_back_by_from_pretrained(ranks2, tmp_path, tied, stage, dtype, fields):
    pytest.importorskip("transformers", reason="the model is transformers'")
    parameters = ranks2.run(_export_llama, tmp_path / "out", tied, stage, dtype, None, fields)[0]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "generation_config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]
    check_llama(tmp_path / "out", parameters, tied, DTYPES.get(dtype, dtype))


@pytest.mark.slow
def test_several_files_from_shards_and_replicas(ranks4, tmp_path):
    pytest.importorskip("transformers", reason="the model is transformers'")
    parameters = ranks4.run(_export_llama, tmp_path / "out", True, 3, "bf16", (2, 2), max_shard_bytes=5000)[0]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 4  # more than one file for a rank
    for name in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "out" / name)
        assert tensors.keys() == {key for key, file in index["weight_map"].items() if file == name}
        assert sum(t.nbytes for t in tensors.values()) <= 5000 or len(tensors) == 1
    check_llama(tmp_path / "out", parameters, True, torch.bfloat16)


def _export_conv(folder):
    model = zeroamp.wrap_model(seeded_conv_net(), policy(config(3)))
    rank = dist.get_rank()
    model(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(rank)))
    zeroamp.export_hf(model, folder, "bf16", max_shard_bytes=200)  # each rank writes some of the buffers
    return full_parameters(model), {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_keep_their_dtype_and_are_the_first_ranks(ranks2, tmp_path):
    (parameters, buffers), (_, others) = ranks2.run(_export_conv, tmp_path)
    assert not torch.equal(buffers["norm.running_mean"], others["norm.running_mean"])
    expected = {name: p.to(torch.bfloat16) for name, p in parameters.items()} | buffers
    found = {name: t for path in tmp_path.glob("*.safetensors") for name, t in load_file(path).items()}
    assert {t.dtype for t in found.values()} == {torch.bfloat16, torch.float32, torch.int64}
    assert same_bits(found, expected) == []
    assert not (tmp_path / "config.json").exists()


def _export_tied_by_hand(folder):
    model = hf_llama(tied=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    zeroamp.export_hf(zeroamp.wrap_model(model, policy(config(3))), folder)


def test_a_tie_that_the_config_does_not_know_is_written_twice(ranks2, tmp_path):
    """A weight whose tie the config does not know is written under both names."""
    transformers = pytest.importorskip("transformers", reason="the model is transformers'")
    ranks2.run(_export_tied_by_hand, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def _export_wrapped_blocks(folder):
    model = build("llama_untied")
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1])
    model = zeroamp.wrap_model(model, policy(config(3)), auto_wrap_policy={"Block"})
    zeroamp.export_hf(torch.compile(model), folder)
    return list(model.state_dict())


def test_names_are_those_of_the_model_without_its_wrappers(ranks2, tmp_path):
    keys = ranks2.run(_export_wrapped_blocks, tmp_path)[0]
    assert any("_orig_mod" in key for key in keys)
    found = load_file(tmp_path / "model.safetensors")
    assert same_bits(found, dict(build("llama_untied").state_dict())) == []


class _Holder(nn.Module):
    """Has a child, a parameter or a buffer with the name that a wrapper of torch gives to its module."""

    def __init__(self, name, kind):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        if kind == "module":
            self.add_module(name, nn.Linear(4, 4))
        elif kind == "parameter":
            self.register_parameter(name, nn.Parameter(torch.ones(4)))
        else:
            self.register_buffer(name, torch.ones(4))

    def forward(self, x):
        return self.inner(x)


def _names_of_wrappers(folder):
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        for kind in ("module", "parameter", "buffer"):
            model = nn.Sequential(_Holder(name, kind), nn.Linear(4, 4))
            model = zeroamp.wrap_model(model, policy(config(3)), auto_wrap_policy={"Linear"})
            train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for call, *arguments in (
                (zeroamp.export_hf, model, folder),
                (zeroamp.load_hf, model, folder),
                (_streamed, model),
                (zeroamp.save_checkpoint, folder, model, train),
            ):
                with pytest.raises(zeroamp.CheckpointError, match=rf"0\.{name} cannot be saved or .* another name"):
                    call(*arguments)


def _streamed(model):
    return list(zeroamp.iter_weights(model))


def test_names_of_wrappers_in_the_users_model_are_refused(ranks2, tmp_path):
    """They are left out of names in files, so two weights could have the same name."""
    ranks2.run(_names_of_wrappers, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def _both_wrappers(folder):
    model = build("llama_untied")
    model.blocks[0] = checkpoint_wrapper(torch.compile(model.blocks[0]))
    model.blocks[1] = torch.compile(checkpoint_wrapper(model.blocks[1]))
    zeroamp.export_hf(zeroamp.wrap_model(model, policy(config(3)), auto_wrap_policy={"Block"}), folder)


def test_wrappers_in_each_other_are_left_out_of_names(ranks2, tmp_path):
    ranks2.run(_both_wrappers, tmp_path)
    assert same_bits(load_file(tmp_path / "model.safetensors"), dict(build("llama_untied").state_dict())) == []


def _export_by_config(folder):
    model = zeroamp.wrap_model(hf_llama(True), policy({**config(), **AUTOCAST_16}))
    before = model.config.to_dict()
    zeroamp.export_hf(model, folder / "low")
    zeroamp.export_hf(model, folder / "fp32", "float32")
    return before == model.config.to_dict(), type(model.config.dtype)


def test_the_config_chooses_the_dtype_where_the_caller_does_not(ranks2, tmp_path):
    pytest.importorskip("transformers", reason="the model is transformers'")
    assert ranks2.run(_export_by_config, tmp_path)[0][0]  # the live config is as it was
    for name, dtype in (("low", torch.bfloat16), ("fp32", torch.float32)):
        assert {t.dtype for t in load_file(tmp_path / name / "model.safetensors").values()} == {dtype}
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["dtype"] == str(dtype).removeprefix("torch.")


def _overflow(folder, dtype, value):
    model = wrapped("llama_untied", config(3))
    with torch.no_grad():
        local = model.blocks[1].down.bias.to_local()
        local[0] = float("inf")
        if dist.get_rank() == 1:
            local[1] = -value
        model.norm.weight.to_local()[0] = value / 2
    with pytest.raises(zeroamp.CheckpointError) as raised:
        zeroamp.export_hf(model, folder, dtype)
    zeroamp.export_hf(model, folder, "fp32")
    return str(raised.value)


@pytest.mark.parametrize(("dtype", "value", "limit"), [("fp16", 70_000.0, "65504"), ("bf16", 3.4e38, "3.38953e+38")])
def test_a_finite_value_that_would_become_infinite_is_refused(ranks2, tmp_path, dtype, value, limit):
    texts = ranks2.run(_overflow, tmp_path, dtype, value)
    assert texts[0] == texts[1]
    assert texts[0].startswith("rank 1: blocks.1.down.bias ")
    for part in (f"{value:g}", limit, "Export in fp32"):
        assert part in texts[0]
    found = load_file(tmp_path / "model.safetensors")  # fp32: infinities that were there are no error
    assert found["blocks.1.down.bias"].isinf().sum() == 2


def _on_a_full_disk(folder):
    model = wrapped("llama_untied", config(3))
    real, safetensors.torch.save_file = safetensors.torch.save_file, _full_disk
    try:
        for wrong in (0, 2.5, "5GB"):
            with pytest.raises(zeroamp.CheckpointError, match=r"max_shard_bytes=?\)? must be an integer from 1 on"):
                zeroamp.export_hf(model, folder, max_shard_bytes=wrong)
        with pytest.raises(zeroamp.CheckpointError) as raised:
            zeroamp.export_hf(model, folder, max_shard_bytes=20_000)
    finally:
        safetensors.torch.save_file = real
    return str(raised.value)


def _full_disk(tensors, path, **options):
    if "00002" in path.name:
        raise OSError(28, "No space left on device")
    path.write_text("new")


def test_a_failed_export_leaves_the_folder_as_it_was(ranks2, tmp_path):
    """A failed export is an error on all ranks and leaves the folder as it was."""
    (tmp_path / "model.safetensors").write_text("of before")
    texts = ranks2.run(_on_a_full_disk, tmp_path)
    text = f"The weights are not exported: OSError: [Errno 28] No space left on device. Weights that {tmp_path} had"
    assert texts == [f"rank 0: {text} before are unchanged."] * 2
    assert [path.read_text() for path in tmp_path.rglob("*")] == ["of before"]


def _export_llama_untied(folder):
    zeroamp.export_hf(wrapped("llama_untied", config(3)), folder)


def test_old_weights_are_replaced_and_other_files_stay(ranks2, tmp_path):
    tmp_path.chmod(0o750)
    old = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
    others = {"tokenizer.json", "model-lora.safetensors"}
    for name in old | others:
        (tmp_path / name).write_text("old")
    ranks2.run(_export_llama_untied, tmp_path)
    assert set(os.listdir(tmp_path)) == others | {"model.safetensors"}
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640  # who may read the folder may read it


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def _refused(folder):
    model = wrapped("llama_untied", config(3))
    stateful = zeroamp.wrap_model(nn.Sequential(WithExtraState(4, 4)), policy(config(3)), auto_wrap_policy={"Linear"})
    rank = dist.get_rank()
    (folder / "file").touch()
    (folder / "checkpoint").mkdir(exist_ok=True)
    (folder / "checkpoint" / "zeroamp.json").touch()
    for arguments, text in (
        ((model, folder / "file"), "file"),
        ((model, folder / "checkpoint"), "it is a checkpoint. Pass another folder"),
        ((model, folder / "out", "int8"), "the dtype of an export must be .*'int8'"),
        ((model, folder / "out", torch.float64), "the dtype of an export must be .*torch.float64"),
        ((model, folder / f"out{rank}"), "same folder on all ranks, but got .*out0' and .*out1'"),
        (
            (model, folder / "out", ("bf16", "fp32")[rank]),
            "same dtype on all ranks, .*torch.bfloat16 and torch.float32",
        ),
        ((stateful, folder / "out"), "^0._extra_state .*a dict.*Leave it out"),
    ):
        with pytest.raises(zeroamp.CheckpointError, match=text):
            zeroamp.export_hf(*arguments)
    with (
        mock.patch.dict(sys.modules, {"safetensors.torch": None}),
        pytest.raises(zeroamp.CheckpointError, match=r"pip install 'zeroamp\[hf\]'"),
    ):
        zeroamp.export_hf(model, folder / "out")


def test_what_cannot_be_written_is_refused_on_all_ranks(ranks2, tmp_path):
    ranks2.run(_refused, tmp_path)
    assert set(os.listdir(tmp_path)) == {"file", "checkpoint"}


def _train_with_exports(stage, folder):
    def export(model, name):
        zeroamp.export_hf(model, folder)

    cfg = config(stage, accumulation=3)
    check_same_run(train("llama_tied", cfg, 2, between=export), train("llama_tied", cfg, 2))


@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
def test_exports_inside_an_accumulation_window_change_nothing(ranks2, tmp_path, stage):
    ranks2.run(_train_with_exports, stage, tmp_path)
