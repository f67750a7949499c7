"""`discover_safe_parameters` against runs with those parameters in bf16, and the models that are harder to run."""

import re
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroamp
from tests.models.parameter_uses import USES, Uses
from tests.models.small import batch, build
from tests.oracles.low_precision_gather import gathered, is_unchanged, randomise, rounded
from zeroamp.dry_run.traced_micro_batch import GradientReady, trace_micro_batch

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(5)).requires_grad_()

POLICY = zeroamp.policy_from_config({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})

UNDECIDED = {
    "disjoint rows": {"w"},
    "concatenated with another": {"w", "b", "lin.weight"},
    "Function with cast_inputs": {"w"},
}
"""Parameters that would change no bit, and stay in fp32 all the same: they are copied or cast in parts, or their dtype
is read."""


@pytest.mark.parametrize("use", USES)
def test_each_way_of_using_a_parameter(use):
    make, expected = USES[use]
    model = randomise(make())
    found = zeroamp.discover_safe_parameters(model, (X,))
    assert found.safe == expected, found.reasons
    for name, reason in found.reasons.items():
        if "never used" not in reason and name not in UNDECIDED.get(use, ()):
            assert is_unchanged(model, gathered(model, [name]), (X,), {}) == (name in found.safe), reason
            assert name not in found.safe or is_unchanged(model, rounded(model, [name]), (X,), {})
    assert is_unchanged(model, gathered(model, found.safe), (X,), {})


def test_it_prints_parameters_and_reasons():
    """It prints the parameters and the reasons and a tied weight by its first name."""
    found = zeroamp.discover_safe_parameters(build("llama_tied"), (batch("llama_tied", 0),))
    num_parameters = len(list(build("llama_tied").parameters()))
    first, *lines = str(found).splitlines()
    assert first == f"{len(found.safe)} of {num_parameters} parameters are safe"
    assert "blocks.0.qkv.weight: safe: cast to bf16 in blocks.0.qkv" in lines
    assert "embed.weight: not safe: read in fp32 by aten.embedding in embed (tied: head.weight)" in lines
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


def _closure(model):
    forward = model.lin.forward
    model.lin.forward = lambda x: forward(x) + 0


def _captured(model):
    weight = model.lin.weight
    model.use = lambda m, x: F.linear(F.linear(x, weight), m.w, m.b)


def _compiled(model):
    model.lin.compile(backend="eager", fullgraph=True)


@pytest.mark.parametrize("reach", [_closure, _compiled])
def test_parameters_are_recognised_however_the_forward_reaches_them(reach):
    model = Uses(lambda m, x: F.linear(m.lin(x), m.w, m.b))
    reach(model)
    weight = model.lin.weight
    assert zeroamp.discover_safe_parameters(model, (X,)).safe == {"lin.weight", "w", "b"}
    assert model.lin.weight is weight
    assert weight.grad is None


def test_a_parameter_that_the_run_cannot_replace_is_undecided():
    model = Uses(lambda m, x: F.linear(m.lin(x), m.w, m.b))
    _captured(model)
    found = zeroamp.discover_safe_parameters(model, (X,))
    assert found.safe == {"w", "b"}
    assert found.reasons["lin.weight"].startswith("not decided")
    assert model.lin.weight.grad is None


class CastsToTheWeight(nn.Module):
    """Casts half of a product to the dtype of a convolution's weight, as Mamba does. The cast has other strides."""

    def __init__(self, dims):
        super().__init__()
        self.lin = nn.Linear(8, 16)
        self.conv = (nn.Conv1d if dims == 1 else nn.Conv2d)(8, 8, 3, padding=1)

    def forward(self, x):
        half = self.lin(x).transpose(1, -1).chunk(2, dim=1)[0]
        return self.conv(half.to(self.conv.weight.dtype))


def test_a_cast_that_only_changes_strides_counts_where_torch_ignores_them():
    """torch makes the input of a Conv1d contiguous. That of a Conv2d may choose another kernel."""
    convolved = zeroamp.discover_safe_parameters(CastsToTheWeight(1), (torch.randn(2, 5, 8),))
    assert {"conv.weight", "lin.weight"} <= convolved.safe
    in_planes = zeroamp.discover_safe_parameters(CastsToTheWeight(2), (torch.randn(2, 5, 4, 8),))
    assert "conv.weight" not in in_planes.safe


class Routed(nn.Module):
    """Runs what the values of its input choose."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        return self.experts[int(x[0, 0] > 0)](x)  # the line that needs a value


def test_a_model_that_needs_values_stays_in_fp32(caplog):
    """A model that needs values stays in fp32 and the warning names the line and the remedy."""
    found = zeroamp.discover_safe_parameters(Routed(), (X,))
    assert found.safe == frozenset()
    assert set(found.reasons) == {name for name, _ in Routed().named_parameters()}
    (text,) = caplog.messages
    place = r"Routed needs the value of a tensor at .*test_traced_parameters\.py:\d+ \(return self\.experts"
    assert re.match(place, text)
    assert re.search(place[7:], found.reasons["experts.0.weight"])
    assert "List classes of modules" in text


class SelfCasting(nn.Module):
    """Casts a part of itself in its forward, as the router of transformers' Switch does."""

    def __init__(self, run):
        super().__init__()
        self.router, self.rnn, self.head = nn.Linear(8, 8), nn.GRU(8, 8), nn.Linear(8, 8)
        self.run = run

    def route(self, x, dtype=torch.float32):
        return self.router.to(dtype)(x)

    def forward(self, x):
        return self.head(self.run(self, x))


def _referred_to(m, x):
    m.reference = weakref.ref(m.router.weight)
    return m.route(x)


def _recomputed(m, x):
    return checkpoint(m.route, x, use_reentrant=False)


def _assigned(m, x):
    for parameter in m.router.parameters():
        parameter.data = parameter.data.float()
    return m.router(x)


CASTS = {
    "once": ("router", SelfCasting.route),
    "to the low dtype": ("router", lambda m, x: m.route(x, torch.bfloat16)),
    "twice": ("router", lambda m, x: m.route(m.route(x))),
    "after a forward": ("router", lambda m, x: m.route(m.router(x))),
    "with a weak reference": ("router", _referred_to),
    "recomputed": ("router", _recomputed),
    "as a part": ("router", lambda m, x: nn.ModuleList([m.router]).float()[0](x)),
    "an RNN": ("rnn", lambda m, x: m.rnn.float()(x)[0]),
    "by an assignment": ("router", _assigned),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["stored in fp32", "stored in bf16"])
def test_what_the_forward_casts_is_not_safe(cast, dtype):
    """A forward may cast a module: its parameters are not safe, because FSDP2 could not reduce their gradients."""
    owner, run = CASTS[cast]
    model = SelfCasting(run).to(dtype)
    found = zeroamp.discover_safe_parameters(model, (X,))
    reasons = {reason for name, reason in found.reasons.items() if name.startswith(owner)}
    assert reasons == {"not safe: its module is cast, or its data assigned, in the root"}
    assert {"head.weight", "head.bias"} <= found.safe
    assert not {name for name in found.safe if name.startswith(owner)}
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not any("_apply" in vars(module) for module in model.modules())


@pytest.mark.parametrize("cast", CASTS)
def test_a_forward_that_casts_can_be_planned(cast):
    """The plan has a gradient of each parameter that the forward casts."""
    owner, run = CASTS[cast]
    model = SelfCasting(run)
    micro_batch = trace_micro_batch(
        model, zeroamp.build_plan(model, POLICY), ((X,), {}), device_type="cpu", checkpointing=False, loss_fn=torch.sum
    )
    ready = {event.param for event in micro_batch.events if isinstance(event, GradientReady)}
    used = {name for name, _ in model.named_parameters() if name.startswith((owner, "head"))}
    assert ready == used


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_training_is_traced_wherever_it_is_called(context):
    make, expected = USES["Function, all low"]  # only a backward can tell
    model, x = make(), X.detach().clone()
    with context():
        assert zeroamp.discover_safe_parameters(model, (x,)).safe == expected
