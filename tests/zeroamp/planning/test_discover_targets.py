"""What `discover_safe_parameters` can be asked for: dtypes, devices, inputs."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroamp
from tests.models.autograd_functions import BF16
from tests.models.parameter_uses import USES, Uses
from tests.processes.ranks import RankError
from zeroamp.planning.example_inputs import example_arguments

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


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built for CUDA")
def test_cuda_needs_a_torch_that_is_built_for_it():
    with pytest.raises(zeroamp.ConfigError, match="device_type .*'cuda'"):
        zeroamp.discover_safe_parameters(Layer(), (X,), device_type="cuda")


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="autograd aborts on CUDA tensors in a CPU build")
def test_cuda_is_traced_where_there_may_be_none():
    model = Uses(lambda m, x: m.lin(x) * torch.mv(m.w, x[0]))  # mv is on CUDA's list alone
    found = {kind: zeroamp.discover_safe_parameters(model, (X,), device_type=kind) for kind in ("cpu", "cuda")}
    assert found["cpu"].safe == {"lin.weight"}
    assert found["cuda"].safe == {"lin.weight", "w"}
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cuda") == torch.float16
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


@pytest.mark.skipif(
    not torch.backends.cuda.is_built() or torch.cuda.is_available(), reason="for a CUDA build without a device"
)
def test_without_a_cuda_device_what_only_a_backward_shows_is_unsafe():
    def discover_on_cuda(use):
        return zeroamp.discover_safe_parameters(USES[use][0](), (X,), device_type="cuda")

    for use in ("disjoint columns", "called twice: one cast, cached"):
        assert discover_on_cuda(use).safe == USES[use][1]
    for use in ("Function, all low", "Function whose gradient is fp32", "Function whose backward reads fp32"):
        assert discover_on_cuda(use).safe == {"w", "b"}
    assert "only a backward could show" in discover_on_cuda("asks for a dtype, to no effect").reasons["w"]

    def opens_a_region(m, x):
        with torch.autocast("cuda", dtype=BF16):
            return m.lin(x)

    with pytest.raises(zeroamp.ConfigError, match="CUDA is not available"):
        zeroamp.discover_safe_parameters(Uses(opens_a_region), (X,), device_type="cuda")
    with pytest.raises(zeroamp.ConfigError, match="LSTM"):
        zeroamp.discover_safe_parameters(nn.LSTM(8, 4), (X,), device_type="cuda")


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
