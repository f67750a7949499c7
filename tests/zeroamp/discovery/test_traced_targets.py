"""What `discover_safe_parameters` can be asked for: models and inputs."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroamp
from tests.processes.ranks import RankError
from zeroamp.discovery.fake_run import example_arguments

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()


class Layer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8))


def _discover_sharded():
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
    zeroamp.discover_safe_parameters(model, (X.detach(),))


def test_a_sharded_model_is_refused(ranks2):
    with pytest.raises(RankError, match="WrapError: .*FSDPLinear.*before wrap_model"):
        ranks2.run(_discover_sharded)


class Dummies(nn.Module):
    """Has inputs of its own, as transformers' models do."""

    main_input_name = "x"

    def __init__(self, dummies):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.dummy_inputs = dummies

    def forward(self, x):
        return self.lin(x)


def test_dummy_inputs_are_used_where_there_are_no_others():
    assert zeroamp.discover_safe_parameters(Dummies({"x": X})).safe == {"lin.weight", "lin.bias"}


@pytest.mark.parametrize("model", [Layer(), Dummies({"input_ids": X})], ids=["none", "of another model"])
def test_no_inputs_are_an_error_that_says_how_to_pass_them(model):
    with pytest.raises(zeroamp.ConfigError, match=r"example_inputs .*Pass a batch, as a tuple"):
        zeroamp.discover_safe_parameters(model)


def test_the_key_that_needs_inputs_is_named():
    autocast = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": "auto"}
    policy = zeroamp.policy_from_config({"torch_autocast": autocast})
    with pytest.raises(zeroamp.ConfigError, match=r"^torch_autocast\.lower_precision_safe_modules .*example_inputs"):
        zeroamp.build_plan(Layer(), policy)


def test_example_inputs_may_be_a_tuple_a_mapping_or_a_tensor():
    model = Layer()
    assert example_arguments(model, X) == ((X,), {})
    assert example_arguments(model, (X, 1)) == ((X, 1), {})
    assert example_arguments(model, {"x": X}) == ((), {"x": X})
    with pytest.raises(zeroamp.ConfigError, match=r"example_inputs .*a list.*example_inputs=\(value,\)"):
        example_arguments(model, [X])
