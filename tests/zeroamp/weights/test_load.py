"""`load_hf`: what is in the files is in the shards, bit for bit, and nothing else was read."""

import json
import os
import re

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file, save_model

import zeroamp
from tests.models.architectures import seeded_conv_net
from tests.models.small import batch, build, hf_llama
from tests.processes.training import config, full_parameters, mesh_of, policy, same_bits, wrapped
from zeroamp.weights.files import INDEX


def _without_values(build_model):
    with torch.device("meta"):
        return build_model()


def _load_llama(folder, tied, stage):
    model = _without_values(lambda: hf_llama(tied))
    torch.manual_seed(7)
    model = zeroamp.wrap_model(model, policy(config(stage)))
    zeroamp.load_hf(model, folder)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch("hf_llama", 0)).logits
    return full_parameters(model), {name: buffer.clone() for name, buffer in model.named_buffers()}, logits


def check_llama(by_rank, folder):
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected_logits = expected(input_ids=batch("hf_llama", 0)).logits
    for parameters, buffers, logits in by_rank:
        assert same_bits(parameters, full_parameters(expected)) == []
        assert same_bits(buffers, dict(expected.named_buffers())) == []
        assert torch.equal(logits, expected_logits)
    assert any("inv_freq" in name for name in by_rank[0][1])


@pytest.mark.parametrize(
    ("tied", "stage", "dtype", "max_shard_size"),
    [
        (True, 3, torch.float32, "5GB"),
        pytest.param(False, 2, torch.bfloat16, "20KB", marks=pytest.mark.slow),
        (False, 0, torch.float16, "20KB"),
    ],
)
def test_a_meta_llama_is_filled_as_from_pretrained_fills_one(ranks2, tmp_path, tied, stage, dtype, max_shard_size):
    pytest.importorskip("transformers", reason="the model is transformers'")
    hf_llama(tied).to(dtype).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX).exists() == (max_shard_size == "20KB")
    check_llama(ranks2.run(_load_llama, tmp_path, tied, stage), tmp_path)


class _Counts:
    """A file whose reads are counted, in bytes."""

    def __init__(self, file, read):
        self._file, self._read = file, read

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def keys(self):
        return self._file.keys()

    def metadata(self):
        return self._file.metadata()

    def get_tensor(self, name):
        self._read[name] = self._file.get_tensor(name).nbytes
        return self._file.get_tensor(name)

    def get_slice(self, name):
        part, read = self._file.get_slice(name), self._read

        class Part:
            get_shape, get_dtype = part.get_shape, part.get_dtype

            def __getitem__(self, rows):
                assert name not in read
                read[name] = part[rows].nbytes
                return part[rows]

        return Part()


def _bytes_read(folder, mesh_shape):
    model = _without_values(seeded_conv_net)
    model = zeroamp.wrap_model(model, policy(config(3)), mesh_of(mesh_shape))
    read, real = {}, safetensors.safe_open
    safetensors.safe_open = lambda *args, **kwargs: _Counts(real(*args, **kwargs), read)
    try:
        zeroamp.load_hf(model, folder)
    finally:
        safetensors.safe_open = real
    shards = {name: p.to_local().nbytes for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return read, shards, full_parameters(model), buffers


@pytest.mark.parametrize(("mesh_shape", "of_5_rows"), [(None, [2, 2, 1, 0]), ((2, 2), [3, 2, 3, 2])])
def test_a_rank_reads_its_own_rows_of_parameters_and_all_of_buffers(ranks4, tmp_path, mesh_shape, of_5_rows):
    expected = seeded_conv_net()
    expected.norm.running_mean.fill_(0.25)
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    by_rank = ranks4.run(_bytes_read, tmp_path, mesh_shape)
    for read, shards, parameters, buffers in by_rank:
        assert read == shards | {name: buffer.nbytes for name, buffer in buffers.items()}
        assert same_bits(parameters, dict(expected.named_parameters())) == []
        assert same_bits(buffers, dict(expected.named_buffers())) == []
    assert [rank[0]["head.bias"] for rank in by_rank] == [4 * rows for rows in of_5_rows]


def _load_plain(folder):
    model = wrapped("llama_tied", config(3))
    zeroamp.load_hf(model, folder)
    return full_parameters(model)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight", "both"])
def test_a_tied_parameter_is_found_under_any_of_its_names(ranks2, tmp_path, name):
    tensors = {key: value.clone() for key, value in build("llama_tied", seed=3).state_dict().items()}
    if name == "both":
        tensors["head.weight"] += 1  # the first name counts
    else:
        del tensors["embed.weight" if name == "head.weight" else "head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    parameters = ranks2.run(_load_plain, tmp_path)[0]
    assert same_bits(parameters, full_parameters(build("llama_tied", seed=3))) == []


def _load_over_gathered_parameters(folder, stage):
    model = wrapped("llama_untied", config(stage, threshold=0), fields={"prefetch_bucket_size": 10**9 * (stage == 3)})
    tokens = batch("llama_untied", 0)
    model.logits = lambda tokens: model.head(model.norm(model.blocks[0](model.embed(tokens))))  # two blocks do not run
    model(tokens)
    del model.logits
    zeroamp.load_hf(model, folder)
    with torch.no_grad():
        return model(tokens)


@pytest.mark.parametrize("stage", [1, 3])
def test_no_copy_of_the_old_values_survives(ranks2, tmp_path, stage):
    expected = build("llama_untied", seed=3)
    save_model(expected, tmp_path / "model.safetensors")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = expected(batch("llama_untied", 0))
    assert all(torch.equal(ours, loss) for ours in ranks2.run(_load_over_gathered_parameters, tmp_path, stage))


@pytest.fixture
def tensors():
    pytest.importorskip("transformers", reason="the model is transformers'")
    state = hf_llama(True).state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if name != "lm_head.weight"}


def _one_file(change=lambda tensors: None):
    """What writes the changed tensors."""

    def write(folder, tensors):
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return write


def _rename(tensors):
    for layer in (0, 1):
        for part in ("q", "k", "v"):
            weight = tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight")
            tensors[f"model.layers.{layer}.attention.{part}.weight"] = weight


def _reshape(tensors):
    tensors["model.norm.weight"] = torch.ones(33)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].t().contiguous()


def _two_files(folder, tensors):
    names = {"a": list(tensors)[:3], "b": list(tensors)[3:]}
    for file, held in names.items():
        save_file({name: tensors[name] for name in held}, folder / f"{file}.safetensors")
    weight_map = {name: f"{file}.safetensors" for file, held in names.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _damaged(damage):
    def write(folder, tensors):
        _two_files(folder, tensors)
        damage(folder / "b.safetensors")

    return write


def _index_out(folder, tensors):
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a/../../outside.safetensors")}))


def _link_out(folder, tensors):
    save_file(tensors, folder.parent / "ffff")
    (folder / "model.safetensors").symlink_to(folder.parent / "ffff")


def _of_other_dtypes(tensors):
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int32)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"] > 0
    tensors["model.layers.1.input_layernorm.weight"] = torch.ones(32, dtype=torch.complex64)


def _several_exports(change):
    """What writes two files of an index, whose ids of exports are those that `change` returns."""

    def write(folder, tensors):
        _two_files(folder, tensors)
        of_index, *of_files = change
        for name, id in zip("ab", of_files, strict=True):
            path = folder / f"{name}.safetensors"
            save_file(load_file(path), path, metadata={"format": "pt"} | ({"zeroamp_export": id} if id else {}))
        index = json.loads((folder / INDEX).read_text())
        metadata = {"zeroamp_export": of_index} if of_index else {}
        (folder / INDEX).write_text(json.dumps({**index, "metadata": metadata}))

    return write


OF_SEVERAL = ["must list files of one export, but they are of several.*Load again"]
AGAIN = [r"^\S+/in/b\.safetensors .* Get the files? again"]
REFUSED = {
    "other names": (
        _one_file(_rename),
        [
            r"6 are missing \(model.layers.0.self_attn.q_proj.weight, ",
            r"and 1 more\) and 6 are not in the model \(model.layers.0.attention.k.weight",
            "from_pretrained before wrap_model",
        ],
    ),
    "other shapes": (
        _one_file(_reshape),
        [
            "2 have another shape",
            r"up_proj.weight is \(32, 64\) instead of \(64, 32\)",
            r"norm.weight is \(33,\)",
        ],
    ),
    "other dtypes": (
        _one_file(_of_other_dtypes),
        [
            "3 have a dtype that the model's cannot hold",
            "model.norm.weight is torch.int32 instead of floating-point",
            "up_proj.weight is torch.bool instead of",
            "input_layernorm.weight is torch.complex64 instead of",
        ],
    ),
    "files of two exports": (_several_exports((None, "a", "b")), OF_SEVERAL),
    "an older index": (_several_exports(("a", "b", "b")), OF_SEVERAL),
    "a file of no export": (_several_exports(("a", "a", None)), OF_SEVERAL),
    "a pickle": (
        lambda folder, tensors: torch.save(tensors, folder / "pytorch_model.bin"),
        [rf"^\S+/in .*model.safetensors.*{INDEX}.*has pytorch_model.bin", "from_pretrained and save_pretrained"],
    ),
    "no folder": (lambda folder, tensors: folder.rmdir(), ["in .*is not a folder.*snapshot_download"]),
    "a file is cut": (_damaged(lambda path: path.write_bytes(path.read_bytes()[:-8])), AGAIN),
    "a file lacks a tensor": (_damaged(lambda path: save_file(dict(list(load_file(path).items())[1:]), path)), AGAIN),
    "an index to ../": (_index_out, ["is not the name of a file in its folder"]),
    "a link out": (_link_out, ["model.safetensors .*is a link to .*ffff. Copy the file"]),
    "a FIFO": (lambda folder, tensors: os.mkfifo(folder / "model.safetensors"), ["not a regular file"]),
}


def _refusal(folder):
    model = zeroamp.wrap_model(hf_llama(True), policy(config(3)))
    before = full_parameters(model)
    with pytest.raises(zeroamp.CheckpointError) as raised:
        zeroamp.load_hf(model, folder)
    assert same_bits(full_parameters(model), before) == []
    return str(raised.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(ranks2, tmp_path, tensors, name):
    write, patterns = REFUSED[name]
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder, tensors)
    text, other = ranks2.run(_refusal, folder)
    assert text == other
    assert [pattern for pattern in patterns if not re.search(pattern, text)] == []


def _load_over_values(folder):
    model = zeroamp.wrap_model(hf_llama(True), policy(config(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    zeroamp.load_hf(model, folder)
    return full_parameters(model), dict(model.named_buffers())


def _with_frequencies(folder, tensors):
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")


def _beside_other_files(folder, tensors):
    _two_files(folder, tensors)
    save_file({"model.norm.weight": torch.zeros(5), "layers.0": torch.zeros(1)}, folder / "consolidated.safetensors")


def _in_the_hubs_cache(folder, tensors):
    (folder / "models--a--b" / "snapshots" / "0a1b").mkdir(parents=True)
    (folder / "models--a--b" / "blobs").mkdir()
    save_file(tensors, folder / "models--a--b" / "blobs" / "ffff")
    (folder / "models--a--b" / "snapshots" / "0a1b" / "model.safetensors").symlink_to("../../blobs/ffff")


@pytest.mark.parametrize(
    ("write", "inside"),
    [
        (_with_frequencies, ""),
        (_beside_other_files, ""),
        (_in_the_hubs_cache, "models--a--b/snapshots/0a1b"),
    ],
)
def test_what_is_passed_over_or_linked_in_the_hubs_cache_changes_nothing(ranks2, tmp_path, tensors, write, inside):
    write(tmp_path, tensors)
    parameters, buffers = ranks2.run(_load_over_values, tmp_path / inside)[0]
    assert same_bits(parameters, full_parameters(hf_llama(True))) == []
    assert same_bits(buffers, dict(hf_llama(True).named_buffers())) == []
