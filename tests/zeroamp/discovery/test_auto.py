"""`lower_precision_safe_modules: "auto"`: what the ledger says of it, which inputs it takes, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroamp
from tests.processes.ranks import RankError
from zeroamp.discovery.fake_run import example_arguments

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()
AUTO = {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": "auto"}}


def _plan(model, **arguments):
    return zeroamp.build_plan(model, zeroamp.policy_from_config(AUTO), **arguments)


class Mixed(nn.Module):
    """A linear layer whose weight is read in fp32 too, and a product with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.read_twice = nn.Linear(8, 8)
        self.projection = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return self.read_twice(x) @ self.projection + self.read_twice.weight.square().sum()


def test_the_ledger_says_what_the_class_list_would_have_got_wrong():
    reasons = {p.fqn: p.reason for p in _plan(Mixed(), example_inputs=torch.randn(2, 8)).params}
    assert reasons["read_twice.weight"].startswith("not safe: read in fp32 by")
    assert reasons["read_twice.weight"].endswith("; the default class list would all-gather it in low precision")
    assert reasons["projection"].startswith("safe: cast to bf16 in")
    assert reasons["projection"].endswith("; the default class list would keep it in fp32")
    assert "default class list" not in reasons["read_twice.bias"]


def test_a_model_with_nothing_safe_is_refused():
    model = nn.Sequential(nn.LayerNorm(4))
    words = r'lower_precision_safe_modules "auto" .*Sequential.*read in fp32 by'
    with pytest.raises(zeroamp.ConfigError, match=words):
        _plan(model, example_inputs=torch.randn(2, 4))


class Branching(nn.Module):
    """Runs what its input asks for."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, which):
        return self.first(x) if which == 0 else self.first(self.second(x))


def _other_inputs_on_every_rank():
    torch.manual_seed(0)
    policy = zeroamp.policy_from_config({**AUTO, "zero_optimization": {"stage": 3}})
    with pytest.raises(zeroamp.WrapError, match="example_inputs") as caught:
        zeroamp.wrap_model(Branching(), policy, example_inputs=(torch.randn(2, 4), dist.get_rank()))
    return str(caught.value)


def test_ranks_that_find_different_sets_are_refused_on_all(ranks2):
    first, second = ranks2.run(_other_inputs_on_every_rank)
    assert first == second


class Layer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8))


def _discover_sharded():
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
    zeroamp.discover_safe_parameters(model, (X.detach(),))


def test_a_sharded_model_is_refused(ranks2):
    with pytest.raises(RankError, match="WrapError: .*FSDPLinear.*before wrap_model"):
        ranks2.run(_discover_sharded)


class _LaunchesAKernel(Layer):
    def forward(self, x):
        y = super().forward(x)
        y.data_ptr()  # a launch of a Triton kernel begins so
        return y


def test_a_kernel_that_takes_a_fake_address_is_an_error():
    """A kernel that takes the address of a fake tensor is an error."""
    with pytest.raises(zeroamp.ConfigError, match=r"_LaunchesAKernel .*y\.data_ptr.*Cannot access.*list classes"):
        zeroamp.discover_safe_parameters(_LaunchesAKernel(), (X,))


def test_no_inputs_are_an_error_that_says_how_to_pass_them():
    with pytest.raises(zeroamp.ConfigError, match=r"example_inputs .*Pass a batch, as a tuple"):
        zeroamp.discover_safe_parameters(Layer())


def test_the_key_that_needs_inputs_is_named():
    with pytest.raises(zeroamp.ConfigError, match=r"^torch_autocast\.lower_precision_safe_modules .*example_inputs"):
        _plan(Layer())


def test_example_inputs_may_be_a_tuple_a_mapping_or_a_tensor():
    model = Layer()
    assert example_arguments(model, X) == ((X,), {})
    assert example_arguments(model, (X, 1)) == ((X, 1), {})
    assert example_arguments(model, {"x": X}) == ((), {"x": X})
    with pytest.raises(zeroamp.ConfigError, match=r"example_inputs .*a list.*example_inputs=\(value,\)"):
        example_arguments(model, [X])
