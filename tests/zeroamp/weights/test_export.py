"""`export_hf`: what comes back out of the files is what the shards hold, bit for bit."""

import json
import os
import re

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from tests.measuring.storage_peak import StoragePeak
from tests.models.architectures import mixtral, seeded_conv_net
from tests.models.small import Llama, batch, build, hf_llama, loss_of
from tests.processes.training import check_same_run, config, full_parameters, policy, same_bits, train, wrapped
from tests.selection import slow_but

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST_16 = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}


def _trained(model, stage, mesh_shape=None, fields=None):
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    model = zeroamp.wrap_model(model, policy(config(stage), fields), mesh)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    step.backward(loss_of(model, batch("hf_llama", 0)))
    step.step()
    return model


def _export_llama(folder, tied, stage, dtype, mesh_shape=None, fields=None, **options):
    model = _trained(hf_llama(tied), stage, mesh_shape, fields)
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


@pytest.mark.parametrize(
    ("tied", "stage", "dtype"),
    [(True, 3, "fp32"), (False, 3, "bf16"), (True, 2, "bf16"), (False, 1, "fp16"), (True, 0, torch.float16)],
)
def test_a_llama_comes_back_by_from_pretrained(ranks2, tmp_path, tied, stage, dtype):
    pytest.importorskip("transformers", reason="the model is transformers'")
    parameters = ranks2.run(_export_llama, tmp_path / "out", tied, stage, dtype)[0]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "generation_config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]
    check_llama(tmp_path / "out", parameters, tied, DTYPES.get(dtype, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [None, (2, 2)])
def test_several_files_from_four_ranks(ranks4, tmp_path, mesh_shape):
    pytest.importorskip("transformers", reason="the model is transformers'")
    parameters = ranks4.run(_export_in_files, tmp_path / "out", mesh_shape)[0]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 4  # more than one file for a rank
    for name in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "out" / name)
        assert tensors.keys() == {key for key, file in index["weight_map"].items() if file == name}
        assert sum(t.nbytes for t in tensors.values()) <= 5000 or len(tensors) == 1
    check_llama(tmp_path / "out", parameters, True, torch.bfloat16)


def _export_in_files(folder, mesh_shape):
    return _export_llama(folder, True, 3, "bf16", mesh_shape, max_shard_bytes=5000)


def test_shards_on_the_cpu(ranks2, tmp_path):
    pytest.importorskip("transformers", reason="the model is transformers'")
    parameters = ranks2.run(_export_llama, tmp_path, False, 3, "bf16", None, {"offload": {"device": "cpu"}})[0]
    check_llama(tmp_path, parameters, False, torch.bfloat16)


def _export_mixtral(folder):
    torch.manual_seed(0)
    model = zeroamp.wrap_model(mixtral("eager")[0], policy(config(3)))
    zeroamp.export_hf(model, folder, "bf16")
    return full_parameters(model)


def test_a_mixture_of_experts_comes_back_by_from_pretrained(ranks2, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the model is transformers'")
    parameters = ranks2.run(_export_mixtral, tmp_path)[0]
    again = full_parameters(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    assert same_bits(again, {name: p.to(torch.bfloat16) for name, p in parameters.items()}) == []


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


def _export_plain(folder):
    model = wrapped("llama_tied", config(3))
    zeroamp.export_hf(model, folder)
    return full_parameters(model)


def test_a_tied_model_of_plain_torch_comes_back_by_safetensors(ranks2, tmp_path):
    parameters = ranks2.run(_export_plain, tmp_path)[0]
    model = Llama(tied=True)
    load_model(model, tmp_path / "model.safetensors")
    assert same_bits(full_parameters(model), parameters) == []
    assert "head.weight" not in load_file(tmp_path / "model.safetensors")


def _export_tied_by_hand(folder):
    model = hf_llama(tied=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    zeroamp.export_hf(zeroamp.wrap_model(model, policy(config(3))), folder)


def test_a_weight_whose_tie_the_config_does_not_know_is_written_under_both_names(ranks2, tmp_path):
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


def _peak(folder, dtype, max_shard_bytes):
    model = wrapped("llama_untied", config(3))
    zeroamp.export_hf(model, folder / "first", dtype, max_shard_bytes=max_shard_bytes)
    files = [load_file(path) for path in sorted((folder / "first").glob("*.safetensors"))]
    mine = max((sum(t.nbytes for t in file.values()) for file in files[dist.get_rank() :: 2]), default=0)
    tensor = max(t.nbytes for file in files for t in file.values())
    limit = mine + tensor + tensor // 2  # the shard that travels is cast too
    del files
    with StoragePeak(limit) as peak:
        zeroamp.export_hf(model, folder / "second", dtype, max_shard_bytes=max_shard_bytes)
    return tensor, peak.num_bytes, limit, mine


@pytest.mark.parametrize(("dtype", "max_shard_bytes"), [("fp32", 20_000), ("bf16", 20_000), ("bf16", 10**9)])
def test_a_rank_holds_no_more_than_its_file_and_one_tensor(ranks2, tmp_path, dtype, max_shard_bytes):
    for tensor, peak, limit, file in ranks2.run(_peak, tmp_path, dtype, max_shard_bytes):
        assert max(tensor, file) <= peak <= limit


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
    assert texts[0].startswith("blocks.1.down.bias ")
    for part in (f"{value:g}", limit, 'dtype="fp32"'):
        assert part in texts[0]
    found = load_file(tmp_path / "model.safetensors")  # fp32: infinities that were there are no error
    assert found["blocks.1.down.bias"].isinf().sum() == 2


def _fails_on_the_second_rank(folder):
    import zeroamp.weights.files

    model = wrapped("llama_untied", config(3))
    real = zeroamp.weights.files.safetensors_torch
    if dist.get_rank() == 1:
        zeroamp.weights.files.safetensors_torch = _FullDisk
    try:
        with pytest.raises(zeroamp.CheckpointError) as raised:
            zeroamp.export_hf(model, folder, max_shard_bytes=20_000)
    finally:
        zeroamp.weights.files.safetensors_torch = real
    return str(raised.value)


class _FullDisk:
    @staticmethod
    def save_file(*_, **__):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("exists", [False, True])
def test_a_rank_that_cannot_write_is_an_error_on_all_and_leaves_the_folder_as_it_was(ranks2, tmp_path, exists):
    folder = tmp_path / "out"
    if exists:
        folder.mkdir()
        (folder / "model.safetensors").write_text("of before")
    texts = ranks2.run(_fails_on_the_second_rank, folder)
    assert texts == ["rank 1: OSError: [Errno 28] No space left on device"] * 2
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["of before"] * exists
    assert os.listdir(tmp_path) == ["out"] * exists


def _refused(folder):
    model = wrapped("llama_untied", config(3))
    rank = dist.get_rank()
    (folder / "file").touch()
    calls = {
        "file": (folder / "file",),
        "dtype": (folder / "out", "int8"),
        "torch dtype": (folder / "out", torch.float64),
        "ranks": (folder / f"out{rank}",),
        "dtypes": (folder / "out", ("bf16", "fp32")[rank]),
    }
    texts = {}
    for name, arguments in calls.items():
        with pytest.raises(zeroamp.CheckpointError) as raised:
            zeroamp.export_hf(model, *arguments)
        texts[name] = str(raised.value)
    return texts


def test_what_cannot_be_written_is_refused_on_all_ranks(ranks2, tmp_path):
    first, second = ranks2.run(_refused, tmp_path)
    assert first == second
    assert f"{tmp_path / 'file'}: it is a file" in first["file"]
    assert re.search(r"^the dtype of an export must be .*'int8'", first["dtype"])
    assert re.search(r"the dtype of an export must be .*torch.float64", first["torch dtype"])
    assert re.search("folder differs: .*out0 and .*out1", first["ranks"])
    assert "dtype differs: torch.bfloat16 and torch.float32" in first["dtypes"]
    assert os.listdir(tmp_path) == ["file"]


def _without_safetensors(folder):
    import sys

    model = wrapped("llama_untied", config(3))
    loaded = sys.modules.pop("safetensors.torch")
    sys.modules["safetensors.torch"] = None
    try:
        with pytest.raises(zeroamp.CheckpointError, match=r"pip install 'zeroamp\[hf\]'"):
            zeroamp.export_hf(model, folder)
    finally:
        sys.modules["safetensors.torch"] = loaded


def test_without_safetensors_the_error_says_what_to_install(ranks2, tmp_path):
    ranks2.run(_without_safetensors, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def _train_with_exports(stage, folder):
    def export(model, name):
        zeroamp.export_hf(model, folder)

    return train("llama_tied", config(stage, accumulation=3), 2, between=None if folder is None else export)


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 3))
def test_exports_inside_an_accumulation_window_change_nothing(ranks2, tmp_path, stage):
    plain = ranks2.run(_train_with_exports, stage, None)
    exported = ranks2.run(_train_with_exports, stage, tmp_path)
    for ours, theirs in zip(exported, plain, strict=True):
        check_same_run(ours, theirs)


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def _export_extra_state(folder):
    model = zeroamp.wrap_model(nn.Sequential(WithExtraState(4, 4)), policy(config(3)), auto_wrap_policy={"Linear"})
    with pytest.raises(zeroamp.CheckpointError, match="^0._extra_state .*a dict.*Leave it out"):
        zeroamp.export_hf(model, folder)


def test_state_that_is_no_tensor_is_refused(ranks2, tmp_path):
    ranks2.run(_export_extra_state, tmp_path)
