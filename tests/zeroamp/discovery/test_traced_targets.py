"""What `discover_safe_parameters` can be asked for: dtypes, devices, inputs."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroamp
from tests.processes.ranks import RankError
from zeroamp.discovery.fake_run import example_arguments

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "dtype .*torch.bfloat16 or torch.float16.*torch.float32"),
        ({"device_type": "meta"}, "device_type .*'meta'"),
        ({"device_type": "nowhere"}, "device_type .*'nowhere'"),
    ],
)
def test_targets_that_cannot_be(options, message):
    with pytest.raises(zeroamp.ConfigError, match=message):
        zeroamp.discover_safe_parameters(Layer(), (X,), **options)


class Layer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_needs_a_device():
    with pytest.raises(zeroamp.ConfigError, match="device_type .*'cuda'"):
        zeroamp.discover_safe_parameters(Layer(), (X,), device_type="cuda")


def _discover_sharded():
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
    zeroamp.discover_safe_parameters(model, (X.detach(),))


def test_a_sharded_model_is_refused(ranks2):
    with pytest.raises(RankError, match="WrapError: .*FSDPLinear.*before wrap_model"):
        ranks2.run(_discover_sharded)


class Dummies(nn.Module):
    main_input_name = "x"

    def __init__(self, dummies):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.dummies = dummies

    @property
    def dummy_inputs(self):
        return self.dummies

    def forward(self, x):
        return self.lin(x)


def test_dummy_inputs_are_used_where_there_are_no_others():
    assert zeroamp.discover_safe_parameters(Dummies({"x": X})).safe == {"lin.weight", "lin.bias"}


@pytest.mark.parametrize("model", [Layer(), Dummies({"input_ids": X})], ids=["none", "of another model"])
def test_no_inputs_are_an_error_that_says_how_to_pass_them(model):
    with pytest.raises(zeroamp.ConfigError, match=r"example_inputs .*Pass a batch, as a tuple"):
        zeroamp.discover_safe_parameters(model)


@pytest.mark.parametrize(
    ("block", "ops", "key"),
    [
        ({"lower_precision_safe_modules": "auto"}, [], 'torch_autocast.lower_precision_safe_modules "auto"'),
        ({}, ["grouped_mm"], "zeroamp.autocast_ops"),
    ],
)
def test_the_key_that_needs_inputs_is_named(block, ops, key):
    autocast = {"enabled": True, "dtype": "bf16", **block}
    policy = zeroamp.policy_from_config({"torch_autocast": autocast, "zeroamp": {"autocast_ops": ops}})
    with pytest.raises(zeroamp.ConfigError, match=rf"^{key} needs inputs of the model's forward, but .*example_inputs"):
        zeroamp.build_plan(Layer(), policy)


def test_example_inputs_may_be_a_tuple_a_mapping_or_a_tensor():
    model = Layer()
    assert example_arguments(model, X) == ((X,), {})
    assert example_arguments(model, (X, 1)) == ((X, 1), {})
    assert example_arguments(model, {"x": X}) == ((), {"x": X})
    with pytest.raises(zeroamp.ConfigError, match=r"example_inputs .*a list.*example_inputs=\(value,\)"):
        example_arguments(model, [X])
