"""`discover_safe_parameters` against runs with those parameters in bf16, and the models that are harder to run."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import zeroamp
from tests.gather_oracle import gathered, is_unchanged, randomise, rounded
from tests.models import MODELS, batch, build
from tests.parameter_uses import BF16, USES, Uses
from tests.ranks import RankError
from zeroamp import discover
from zeroamp.example_inputs import example_arguments
from zeroamp.ownership import find_uses
from zeroamp.policies.safe_modules import DEFAULT_SAFE_MODULES, resolve_safe_classes, unsafe_owner

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()


@pytest.mark.parametrize("use", USES)
def test_each_way_of_using_a_parameter(use):
    make, expected = USES[use]
    model = randomise(make())
    found = zeroamp.discover_safe_parameters(model, (X,))
    assert found.safe == expected, found.reasons
    for name, reason in found.reasons.items():
        if "never used" not in reason:
            assert is_unchanged(model, gathered(model, [name]), (X,), {}) == (name in found.safe), reason
            assert name not in found.safe or is_unchanged(model, rounded(model, [name]), (X,), {})
    assert is_unchanged(model, gathered(model, found.safe), (X,), {})


def _class_list(model):
    classes = resolve_safe_classes(DEFAULT_SAFE_MODULES, model)
    return {use.fqns[0] for use in find_uses(model, []) if unsafe_owner(use.named_owners(), classes) is None}


@pytest.mark.parametrize("name", MODELS)
def test_the_small_models_agree_with_the_class_list(name):
    if name == "hf_llama":
        pytest.importorskip("transformers", reason="the model is transformers'")
    model = build(name)
    found = zeroamp.discover_safe_parameters(model, (batch(name, 0),))
    # nn.MultiheadAttention is in no list, yet all it does with its input projection is a linear layer.
    beyond = {f"encoder.layers.{i}.self_attn.in_proj_{kind}" for i in (0, 1) for kind in ("weight", "bias")}
    assert found.safe - _class_list(model) == (beyond if name == "encoder" else set())
    assert _class_list(model) <= found.safe
    assert set(found.reasons) == {name for name, _ in model.named_parameters()}


def test_a_tied_weight_has_its_first_name_and_says_the_others():
    found = zeroamp.discover_safe_parameters(build("llama_tied"), (batch("llama_tied", 0),))
    assert found.reasons["embed.weight"] == "not safe: read in fp32 by aten.embedding in embed (tied: head.weight)"
    assert "head.weight" not in found.reasons


def test_float16():
    model = randomise(Uses(lambda m, x: F.linear(m.lin(x), m.w, m.b) + F.linear(x, m.w.half())))
    found = zeroamp.discover_safe_parameters(model, (X,), dtype=torch.float16)
    assert found.safe == {"lin.weight", "b"}  # w: one cast by autocast, one by the model
    assert found.reasons["lin.weight"] == "safe: cast to fp16 in lin"
    for name in found.reasons:
        unchanged = is_unchanged(model, gathered(model, [name], torch.float16), (X,), {}, torch.float16)
        assert unchanged == (name in found.safe)


def test_derived_weights_are_used_where_they_are_derived():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    assert zeroamp.discover_safe_parameters(model, (X,)).safe == {"0.bias"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old function, still common
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)))
    weight = model[0].weight
    assert zeroamp.discover_safe_parameters(model, (X,)).safe == {"0.bias"}
    assert model[0].weight is weight


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = build("llama_untied")
    found = zeroamp.discover_safe_parameters(model, (batch("llama_untied", 0),))
    assert found.safe == _class_list(model)
    assert all(parameter.is_meta for parameter in model.parameters())


def _closure(model):
    forward = model.lin.forward
    model.lin.forward = lambda x: forward(x) + 0


def _partial(model):
    model.lin.forward = functools.partial(type(model.lin).forward, model.lin)


def _hidden_list(model):
    model.held = [[model.lin.weight]]
    model.use = lambda m, x: F.linear(F.linear(x, m.held[0][0]), m.w, m.b)


def _captured(model):
    weight = model.lin.weight
    model.use = lambda m, x: F.linear(F.linear(x, weight), m.w, m.b)


def _compiled(model):
    model.lin.compile(backend="eager")


def _shared(model):
    model.again = model.lin
    model.use = lambda m, x: F.linear(m.again(m.lin(x)), m.w, m.b)


@pytest.mark.parametrize("reach", [_closure, _partial, _hidden_list, _captured, _compiled, _shared])
def test_parameters_are_recognised_however_the_forward_reaches_them(reach):
    model = Uses(lambda m, x: F.linear(m.lin(x), m.w, m.b))
    reach(model)
    weight = model.lin.weight
    assert zeroamp.discover_safe_parameters(model, (X,)).safe == {"lin.weight", "w", "b"}
    assert model.lin.weight is weight
    assert weight.grad is None


def test_called_where_there_is_no_gradient():
    model = Uses(
        lambda m, x: (
            F.linear(F.linear(x, m.w[:5]), m.lin.weight[:, :5]) + F.linear(F.linear(x, m.w[:5]), m.lin.weight[:, :5])
        )
    )
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert zeroamp.discover_safe_parameters(model, (X,)).safe == set()


class Experts(nn.Module):
    """Routes by value, so that only a real run can follow it; expert 2 is reached if the first input is positive."""

    def __init__(self, last=None):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)])
        if last is not None:
            self.experts[2] = last

    def forward(self, x):
        y = self.norm(x)
        for i, expert in enumerate(self.experts):
            if i < 2 or x[0, 0] > 0:
                y = y + expert(y)
        return y


def _routed(positive):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 1.0 if positive else -1.0
    return x


@pytest.mark.parametrize("positive", [True, False])
def test_an_expert_that_is_not_reached_follows_its_twins(positive):
    model = randomise(Experts())
    found = zeroamp.discover_safe_parameters(model, (_routed(positive),))
    assert found.safe == {f"experts.{i}.0.{kind}" for i in range(3) for kind in ("weight", "bias")}
    expected = (
        "cast to bf16 in experts.2.0"
        if positive
        else "not reached by the example inputs, but the same code as experts.0"
    )
    assert found.reasons["experts.2.0.weight"] == f"safe: {expected}"
    if not positive:
        assert found.reasons["experts.2.1.weight"] == "not safe: never used in the traced run"
    # The oracle routes to it.
    x = _routed(True)
    assert is_unchanged(model, gathered(model, found.safe), (x,), {})


def _patched():
    expert = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    expert[0].forward = lambda x: x + expert[0].weight.sum()
    return expert


def _hooked():
    expert = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    expert[0].register_forward_pre_hook(lambda module, args: args[0] * module.weight.mean())
    return expert


class OtherLinear(nn.Linear):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(OtherLinear(8, 8), nn.LayerNorm(8)),
        lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8)),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval(),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.LayerNorm(8)),
        _patched,
        _hooked,
    ],
    ids=["class", "parameters", "training", "depth", "frozen", "patched", "hooked"],
)
def test_an_expert_that_is_not_like_the_others_follows_none(make):
    found = zeroamp.discover_safe_parameters(Experts(last=make()), (_routed(False),))
    assert found.reasons["experts.2.0.weight"] == "not safe: never used in the traced run"
    assert not any(name.startswith("experts.2") for name in found.safe)


def test_without_routing_by_value_an_unused_module_follows_none():
    model = Experts()
    model.forward = lambda x: model.experts[1](model.experts[0](x))
    found = zeroamp.discover_safe_parameters(model, (X,))
    assert found.reasons["experts.2.0.weight"] == "not safe: never used in the traced run"


def test_a_model_that_needs_values_and_cannot_have_them(monkeypatch):
    with torch.device("meta"):
        model = Experts()
    with pytest.raises(
        zeroamp.ConfigError,
        match=r"lower_precision_safe_modules: found \"auto\" for Experts, which fake.*on the meta device",
    ):
        zeroamp.discover_safe_parameters(model, (_routed(True),))
    with pytest.raises(zeroamp.ConfigError, match="on the meta device"):
        zeroamp.discover_safe_parameters(Experts(), (_routed(True).to("meta"),))
    monkeypatch.setattr(discover, "MAX_REAL_RUN_BYTES", 900)
    with pytest.raises(zeroamp.ConfigError, match=r"its parameters are 0\.0 GiB"):
        zeroamp.discover_safe_parameters(Experts(), (_routed(True),))


def test_an_error_of_the_forward_is_the_users():
    def forward(m, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        zeroamp.discover_safe_parameters(Uses(forward), (X,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "dtype: found torch.float32; valid: torch.bfloat16 or torch.float16"),
        ({"device_type": "meta"}, "device_type: found 'meta', which this torch"),
        ({"device_type": "nowhere"}, "device_type: found 'nowhere', which this torch"),
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
    with pytest.raises(zeroamp.ConfigError, match="device_type: found 'cuda'"):
        zeroamp.discover_safe_parameters(Layer(), (X,), device_type="cuda")


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="autograd aborts on CUDA tensors in a CPU build")
def test_cuda_is_traced_where_there_may_be_none():
    model = Uses(lambda m, x: m.lin(x) * torch.mv(m.w, x[0]))  # mv is on CUDA's list alone
    found = {kind: zeroamp.discover_safe_parameters(model, (X,), device_type=kind) for kind in ("cpu", "cuda")}
    assert found["cpu"].safe == {"lin.weight"}
    assert found["cuda"].safe == {"lin.weight", "w"}
    assert not torch.is_autocast_enabled("cuda")


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
    with pytest.raises(RankError, match="WrapError: FSDPLinear: found a model that FSDP2 has sharded"):
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
    with pytest.raises(zeroamp.ConfigError, match=r"example_inputs: found none.*Pass a batch, as a tuple"):
        zeroamp.discover_safe_parameters(model)


def test_example_inputs_may_be_a_tuple_a_mapping_or_a_tensor():
    model = Layer()
    assert example_arguments(model, X) == ((X,), {})
    assert example_arguments(model, (X, 1)) == ((X, 1), {})
    assert example_arguments(model, {"x": X}) == ((), {"x": X})
    with pytest.raises(zeroamp.ConfigError, match=r"example_inputs: found a list; .*example_inputs=\(value,\)"):
        example_arguments(model, [X])
