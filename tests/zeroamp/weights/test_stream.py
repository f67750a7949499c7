"""`iter_weights`: the bits of `full_tensor()`, the published names, and at most two buckets beside the shards."""

from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import zeroamp
from tests.measuring.storage_peak import StoragePeak
from tests.models.architectures import mixtral, seeded_conv_net
from tests.processes.training import config, full_parameters, policy, same_bits, wrapped

SMALL = 4000
"""Bytes of a bucket: several tensors of the models below, and less than their largest."""


def _streamed(name, stage, mesh_shape, fields):
    model = wrapped(name, config(stage), mesh_shape=mesh_shape, fields=fields)
    expected = {fqn: tensor.bfloat16() for fqn, tensor in full_parameters(model).items()}
    found = [list(zeroamp.iter_weights(model, bucket_bytes=size)) for size in (SMALL, 2**30)]
    for each in found:
        assert [fqn for fqn, _ in each] == list(expected)
        assert {type(tensor) for _, tensor in each} == {torch.Tensor}
        assert same_bits(dict(each), expected) == []
    whole = dict(zeroamp.iter_weights(model, dtype=None, bucket_bytes=SMALL, names="model"))
    assert same_bits(whole, full_parameters(model)) == []
    return [fqn for fqn, _ in zeroamp.iter_weights(model, to="first")]


@pytest.mark.parametrize(
    ("name", "stage", "mesh_shape", "fields"),
    [
        ("llama_untied", 0, None, {}),
        ("llama_untied", 2, (2, 2), {}),
        ("encoder", 3, None, {"shard_dim": 0}),
        ("llama_untied", 3, None, {"offload": {"device": "cpu"}}),
    ],
)
def test_the_bits_are_those_of_each_full_tensor(request, name, stage, mesh_shape, fields):
    ranks = request.getfixturevalue("ranks2" if mesh_shape is None else "ranks4")
    first, *others = ranks.run(_streamed, name, stage, mesh_shape, fields)
    assert first
    assert not any(others)


def _published(folder):
    torch.manual_seed(0)
    model = zeroamp.wrap_model(mixtral("eager")[0], policy(config(3)))
    zeroamp.export_hf(model, folder, "bf16")
    return {name: tensor.clone() for name, tensor in zeroamp.iter_weights(model, bucket_bytes=SMALL)}


def test_names_of_experts_are_those_of_save_pretrained(ranks2, tmp_path):
    """Names and layout of a mixture of experts are those of `save_pretrained` as in an export."""
    pytest.importorskip("transformers", reason="the model is transformers'")
    torch.manual_seed(0)
    mixtral("eager")[0].to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert any("experts.3.w1" in name for name in theirs)
    streamed = ranks2.run(_published, tmp_path / "ours")
    for ours in (*streamed, load_file(tmp_path / "ours" / "model.safetensors")):
        assert same_bits(ours, theirs) == []


def _peak():
    model = wrapped("llama_untied", config(3))
    largest = max(2 * parameter.numel() for parameter in model.parameters())
    bucket = max(SMALL, largest)
    with StoragePeak(3 * bucket) as peak:
        for _name, tensor in zeroamp.iter_weights(model, bucket_bytes=SMALL):
            tensor.add_(0)
    return peak.num_bytes, bucket


def test_at_most_two_buckets_exist_beside_the_shards(ranks2):
    for peak, bucket in ranks2.run(_peak):
        cast = 2 * bucket // 2  # the shards of two buckets, cast: gloo holds those of the last a moment longer
        assert bucket < peak <= 2 * bucket + cast


def _buffers():
    model = zeroamp.wrap_model(seeded_conv_net(), policy(config(3)))
    found = dict(zeroamp.iter_weights(model, torch.float16))
    assert found["norm.running_mean"].dtype == torch.float32
    assert found.keys() == model.state_dict().keys()
    for arguments, text in (
        ({"names": "vllm"}, r"iter_weights\(names=\) must be one of \('hf', 'model'\), but is 'vllm'"),
        ({"to": 0}, r"iter_weights\(to=\) must be one of \('all', 'first'\), but is 0"),
        ({"bucket_bytes": 0}, r"iter_weights\(bucket_bytes=\) must be an integer from 1 on, but is 0"),
    ):
        with pytest.raises(zeroamp.CheckpointError, match=text):
            zeroamp.iter_weights(model, **arguments)


def test_buffers_keep_their_dtype_and_wrong_arguments_are_errors(ranks2):
    ranks2.run(_buffers)


def _async_all_gathers():
    model = wrapped("encoder", config(3))
    assert {parameter.placements[0].dim for parameter in model.parameters()} > {0}
    with mock.patch.object(DTensor, "redistribute", autospec=True, side_effect=DTensor.redistribute) as redistribute:
        assert list(zeroamp.iter_weights(model))
    return {call.kwargs["async_op"] for call in redistribute.call_args_list}


def test_on_a_cpu_no_all_gather_of_several_dimensions_is_in_flight(ranks2):
    """Those of several dimensions, if they run at the same time, damage the heap."""
    assert ranks2.run(_async_all_gathers) == [{False}] * 2
