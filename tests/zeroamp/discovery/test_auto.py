"""`lower_precision_safe_modules: "auto"`: trained bit for bit as plain autocast, and what the ledger says of it."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models.architectures import ARCHITECTURES, TRANSFORMERS
from tests.models.small import Llama, batch
from tests.processes.training import full_parameters, same_bits
from tests.selection import slow_but

AUTO = {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": "auto"}}
NAMES = [name for name in ARCHITECTURES if name not in ("encoder_eval", "llama_checkpointed")]
NUM_STEPS = 3


def config(stage=3):
    return {**AUTO, "zero_optimization": {"stage": stage}}


def _build(name):
    torch.manual_seed(0)
    model, args, kwargs = ARCHITECTURES[name]()
    return model.train(), args, kwargs


def _of_rank(inputs, index):
    """The inputs of one rank and step: other values, same shapes."""
    if isinstance(inputs, dict):
        return {key: _of_rank(value, index) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_of_rank(value, index) for value in inputs)
    if inputs.is_floating_point():
        return inputs + 0.1 * index
    return inputs if int(inputs.max()) == 1 else (inputs + 7 * index) % 64  # an attention mask stays


def _loss(output):
    logits = getattr(output, "logits", None)
    return (output if logits is None else logits).float().square().mean()


def _train_wrapped(name, stage):
    # A T5 block returns a view; nothing here writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    model, args, kwargs = _build(name)
    zeroamp.wrap_model(model, zeroamp.policy_from_config(config(stage)), example_inputs=kwargs or args)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for index in range(NUM_STEPS):
        which = 2 * index + dist.get_rank()
        step.backward(_loss(model(*_of_rank(args, which), **_of_rank(kwargs, which))))
        losses.append(step.step().loss)
    return losses, full_parameters(model)


def _train_plain(name):
    model, args, kwargs = _build(name)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for index in range(NUM_STEPS):
        of_ranks = []
        for which in (2 * index, 2 * index + 1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = _loss(model(*_of_rank(args, which), **_of_rank(kwargs, which)))
            of_ranks.append((float(loss.detach()), torch.autograd.grad(loss, parameters, materialize_grads=True)))
        losses.append(sum(loss for loss, _ in of_ranks) / 2)
        for parameter, first, second in zip(parameters, of_ranks[0][1], of_ranks[1][1], strict=True):
            parameter.grad = (first + second) / 2
        optimizer.step()
    return losses, {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


@pytest.mark.parametrize("name", slow_but(NAMES, "llama", "mixtral"))
def test_training_is_bit_for_bit_plain_autocast(ranks2, name):
    if name in TRANSFORMERS:
        pytest.importorskip("transformers", reason="the model is transformers'")
    losses, parameters = ranks2.run(_train_wrapped, name, 3)[0]
    expected_losses, expected = _train_plain(name)
    assert losses == expected_losses
    assert same_bits(parameters, expected) == []


def _plan(model, **arguments):
    return zeroamp.build_plan(model, zeroamp.policy_from_config(config()), **arguments)


def test_where_the_default_list_is_right_auto_finds_the_same(caplog):
    by_class = {**AUTO["torch_autocast"]}
    del by_class["lower_precision_safe_modules"]
    model = Llama(tied=True)
    listed = zeroamp.build_plan(model, zeroamp.policy_from_config({"torch_autocast": by_class}))
    found = zeroamp.build_plan(model, zeroamp.policy_from_config(AUTO), example_inputs=batch("llama", 0))
    assert [(p.fqn, p.dtypes) for p in found.params] == [(p.fqn, p.dtypes) for p in listed.params]
    assert not [p.reason for p in found.params if "default class list" in p.reason]


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


def test_without_inputs_it_says_how_to_pass_them():
    with pytest.raises(zeroamp.ConfigError, match="needs inputs .*Pass example_inputs: a batch"):
        _plan(Mixed())


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
    policy = zeroamp.policy_from_config(config())
    with pytest.raises(zeroamp.WrapError, match="example_inputs") as caught:
        zeroamp.wrap_model(Branching(), policy, example_inputs=(torch.randn(2, 4), dist.get_rank()))
    return str(caught.value)


def test_ranks_that_find_different_sets_are_refused_on_all(ranks2):
    first, second = ranks2.run(_other_inputs_on_every_rank)
    assert first == second


def _module_that_casts_itself():
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return (x.bfloat16() @ self.weight.bfloat16()).float()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Casts())
    zeroamp.wrap_model(model, zeroamp.policy_from_config(config()), example_inputs=torch.randn(2, 4))
    model(torch.randn(2, 4)).sum().backward()
    return [p.dtypes.param for p in zeroamp.explain(model).plan.params]


def test_a_module_that_casts_its_weight_itself_is_safe_and_runs(ranks2):
    assert set(ranks2.run(_module_that_casts_itself)[0]) == {torch.bfloat16}
