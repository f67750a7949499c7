"""`load_hf`: what is in the files is in the shards, bit for bit, and nothing else was read."""

import json
import os
import re

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file, save_model
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from tests.models.architectures import mixtral, seeded_conv_net
from tests.models.small import batch, build, hf_llama, hf_llama_config
from tests.processes.training import config, full_parameters, policy, same_bits, wrapped
from zeroamp.weights.files import INDEX


def _without_values(build_model):
    with torch.device("meta"):
        return build_model()


def _load_llama(folder, tied, stage, mesh_shape=None):
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    model = _without_values(lambda: hf_llama(tied))
    torch.manual_seed(7)
    model = zeroamp.wrap_model(model, policy(config(stage)), mesh)
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
        pytest.param(True, 1, torch.bfloat16, "5GB", marks=pytest.mark.slow),
        (False, 0, torch.float16, "20KB"),
    ],
)
def test_a_meta_llama_is_filled_as_from_pretrained_fills_one(ranks2, tmp_path, tied, stage, dtype, max_shard_size):
    pytest.importorskip("transformers", reason="the model is transformers'")
    hf_llama(tied).to(dtype).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX).exists() == (max_shard_size == "20KB")
    check_llama(ranks2.run(_load_llama, tmp_path, tied, stage), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [None, (2, 2)])
def test_four_ranks_and_hybrid_sharding(ranks4, tmp_path, mesh_shape):
    pytest.importorskip("transformers", reason="the model is transformers'")
    hf_llama(True).save_pretrained(tmp_path)
    check_llama(ranks4.run(_load_llama, tmp_path, True, 3, mesh_shape), tmp_path)


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


def _bytes_read(folder):
    model = _without_values(seeded_conv_net)
    model = zeroamp.wrap_model(model, policy(config(3)))
    read, real = {}, safetensors.safe_open
    safetensors.safe_open = lambda *args, **kwargs: _Counts(real(*args, **kwargs), read)
    try:
        zeroamp.load_hf(model, folder)
    finally:
        safetensors.safe_open = real
    shards = {name: p.to_local().nbytes for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return read, shards, full_parameters(model), buffers


def test_a_rank_reads_its_own_rows_of_parameters_and_all_of_buffers(ranks4, tmp_path):
    expected = seeded_conv_net()
    expected.norm.running_mean.fill_(0.25)
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    by_rank = ranks4.run(_bytes_read, tmp_path)
    for read, shards, parameters, buffers in by_rank:
        assert read == shards | {name: buffer.nbytes for name, buffer in buffers.items()}
        assert same_bits(parameters, dict(expected.named_parameters())) == []
        assert same_bits(buffers, dict(expected.named_buffers())) == []
    # Of 5 rows four ranks hold 2, 2, 1 and none.
    assert [rank[0]["head.bias"] for rank in by_rank] == [8, 8, 4, 0]


def _load_plain(folder, tied):
    model = wrapped("llama_tied" if tied else "llama_untied", config(3))
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
    parameters = ranks2.run(_load_plain, tmp_path, True)[0]
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_copy_of_the_old_values_survives(ranks2, tmp_path, stage):
    expected = build("llama_untied", seed=3)
    save_model(expected, tmp_path / "model.safetensors")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = expected(batch("llama_untied", 0))
    assert all(torch.equal(ours, loss) for ours in ranks2.run(_load_over_gathered_parameters, tmp_path, stage))


def _refusal(folder, name):
    model = zeroamp.wrap_model({"hf_llama": lambda: hf_llama(True), "moe": lambda: mixtral("eager")[0]}[name](),
                               policy(config(3)))  # fmt: skip
    before = full_parameters(model)
    with pytest.raises(zeroamp.CheckpointError) as raised:
        zeroamp.load_hf(model, folder)
    unchanged = same_bits(full_parameters(model), before) == []
    return str(raised.value), unchanged


def refusal(ranks, folder, name="hf_llama"):
    (text, unchanged), (other, _) = ranks.run(_refusal, folder, name)
    assert text == other
    return text, unchanged


@pytest.fixture
def tensors():
    pytest.importorskip("transformers", reason="the model is transformers'")
    state = hf_llama(True).state_dict()
    return {name: tensor.clone() for name, tensor in state.items() if name != "lm_head.weight"}


def test_names_that_are_not_the_models_are_counted_and_the_first_are_named(ranks2, tmp_path, tensors):
    for layer in (0, 1):
        for part in ("q", "k", "v"):
            weight = tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight")
            tensors[f"model.layers.{layer}.attention.{part}.weight"] = weight
    save_file(tensors, tmp_path / "model.safetensors")
    text, unchanged = refusal(ranks2, tmp_path)
    assert unchanged
    assert "6 are missing (model.layers.0.self_attn.q_proj.weight, " in text
    assert "and 1 more) and 6 are not in the model (model.layers.0.attention.k.weight" in text
    assert "from_pretrained before wrap_model" in text


def test_other_shapes_are_refused(ranks2, tmp_path, tensors):
    tensors["model.norm.weight"] = torch.ones(33)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].t().contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    text, unchanged = refusal(ranks2, tmp_path)
    assert unchanged
    for part in ("2 have another shape", "up_proj.weight is (32, 64) instead of (64, 32)", "norm.weight is (33,)"):
        assert part in text


def _load_with_frequencies(folder):
    model = zeroamp.wrap_model(hf_llama(True), policy(config(3)))
    zeroamp.load_hf(model, folder)
    return full_parameters(model), dict(model.named_buffers())


def test_stored_rotary_frequencies_are_passed_over(ranks2, tmp_path, tensors):
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    parameters, buffers = ranks2.run(_load_with_frequencies, tmp_path)[0]
    assert same_bits(parameters, full_parameters(hf_llama(True))) == []
    assert same_bits(buffers, dict(hf_llama(True).named_buffers())) == []


def test_a_pickle_is_refused(ranks2, tmp_path, tensors):
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    text, _ = refusal(ranks2, tmp_path)
    assert text.startswith(str(tmp_path))
    assert re.search(f"model.safetensors.*{INDEX}.*has pytorch_model.bin", text)
    assert "from_pretrained and save_pretrained" in text


def test_a_folder_that_is_not_there_is_refused(ranks2, tmp_path):
    pytest.importorskip("transformers", reason="the model is transformers'")
    assert re.search("none .*is not a folder.*snapshot_download", refusal(ranks2, tmp_path / "none")[0])
    assert re.search("has neither.*snapshot_download", refusal(ranks2, tmp_path)[0])


def _index(folder, tensors, **files):
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / f"{file}.safetensors")
    weight_map = {name: f"{file}.safetensors" for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_files_that_the_index_does_not_name_are_left_alone(ranks2, tmp_path, tensors):
    _index(tmp_path, tensors, a=list(tensors)[:3], b=list(tensors)[3:])
    save_file({"model.norm.weight": torch.zeros(5), "layers.0": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    parameters, _ = ranks2.run(_load_with_frequencies, tmp_path)[0]
    assert same_bits(parameters, full_parameters(hf_llama(True))) == []


@pytest.mark.parametrize("damage", ["gone", "cut short", "other tensors"])
def test_a_damaged_file_is_named(ranks2, tmp_path, tensors, damage):
    _index(tmp_path, tensors, a=list(tensors)[:3], b=list(tensors)[3:])
    path = tmp_path / "b.safetensors"
    if damage == "gone":
        path.unlink()
    elif damage == "cut short":
        path.write_bytes(path.read_bytes()[:-8])
    else:
        save_file(dict(list(load_file(path).items())[1:]), path)
    text, unchanged = refusal(ranks2, tmp_path)
    assert unchanged
    assert re.search(rf"^{re.escape(str(path))} .* Get the files? again", text)


def _trains_after_loading(folder):
    model = zeroamp.wrap_model(hf_llama(True), policy(config(1)))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0))
    zeroamp.load_hf(model, folder)  # after the optimizer was built
    step.backward(model(input_ids=batch("hf_llama", dist.get_rank()), labels=batch("hf_llama", 0)).loss)
    return step.step().grad_norm


def test_a_model_trains_after_it_was_loaded_as_one_that_was_built_so(ranks2, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the model is transformers'")
    torch.manual_seed(9)
    other = transformers.LlamaForCausalLM(hf_llama_config())
    other.save_pretrained(tmp_path)
    norms = ranks2.run(_trains_after_loading, tmp_path)
    hf_llama(True).save_pretrained(tmp_path)
    assert norms[0] != ranks2.run(_trains_after_loading, tmp_path)[0]


def _index_of(folder, tensors, file):
    folder.mkdir(exist_ok=True)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, str(file))}))


@pytest.mark.parametrize("file", ["../outside.safetensors", "absolute", "a/../../outside.safetensors", ".."])
def test_an_index_that_leads_out_of_its_folder_is_refused(ranks2, tmp_path, tensors, file):
    save_file(tensors, tmp_path / "outside.safetensors")
    _index_of(tmp_path / "in", tensors, tmp_path / "outside.safetensors" if file == "absolute" else file)
    text, unchanged = refusal(ranks2, tmp_path / "in")
    assert unchanged
    assert "is not the name of a file in its folder" in text


def test_a_link_out_of_the_folder_is_refused_unless_it_leads_into_the_hubs_cache(ranks2, tmp_path, tensors):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    save_file(tensors, blobs / "ffff")
    (snapshot / "model.safetensors").symlink_to("../../blobs/ffff")
    expected = full_parameters(hf_llama(True))
    by_rank = ranks2.run(_load_llama, snapshot, True, 3)
    assert all(same_bits(parameters, expected) == [] for parameters, _, _ in by_rank)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors").symlink_to(blobs / "ffff")
    text, unchanged = refusal(ranks2, tmp_path / "in")
    assert unchanged
    assert re.search("model.safetensors .*is a link to .*ffff. Copy the file", text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_fifo_among_the_files_is_refused(ranks2, tmp_path, tensors, name):
    os.mkfifo(tmp_path / name)
    text, unchanged = refusal(ranks2, tmp_path)
    assert unchanged
    assert "not a regular file" in text
