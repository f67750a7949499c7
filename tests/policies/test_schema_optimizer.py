"""The block `optimizer`: defaults, names, the words of each refusal, and the round trip."""

import json

import pytest
import torch

from zeroamp import ConfigError, policy_from_config
from zeroamp.policies.schema import OPTIMIZER_PARAMS, OptimizerBlock
from zeroamp.policies.schema.keys import Honoured, Unsupported, iter_keys


def optimizer(**block):
    return policy_from_config({"optimizer": block}).optimizer


def test_without_the_block_the_policy_has_none():
    assert policy_from_config({}).optimizer is policy_from_config({"optimizer": None}).optimizer is None


def test_the_type_is_written_as_deepspeed_writes_it_whatever_the_case():
    assert [optimizer(type=name).type for name in ("adam", "ADAMW", "sgd")] == ["Adam", "AdamW", "SGD"]


@pytest.mark.parametrize(
    ("params", "torch_optimizer"),
    [
        ({"type": "Adam"}, torch.optim.Adam),
        ({"type": "AdamW"}, torch.optim.Adam),  # FusedAdam decays nothing by default: as torch's Adam, not its AdamW
        ({"type": "AdamW", "params": {"torch_adam": True}}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"torch_adam": True}}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "SGD"}, torch.optim.SGD),
    ],
    ids=str,
)
def test_defaults_are_those_of_the_optimizer_that_deepspeed_builds(params, torch_optimizer):
    block = optimizer(**params).params
    ours = block.model_dump()
    if "betas" in ours:
        ours["weight_decay"] = block.weight_decay_or_default
    theirs = torch_optimizer([torch.nn.Parameter(torch.zeros(1))]).defaults
    assert {key: theirs[key] for key in ours if key in theirs} == {key: ours[key] for key in ours if key in theirs}
    assert set(theirs) - set(ours) <= {"decoupled_weight_decay"}


ADAM_KEYS = (
    "adam_w_mode, amsgrad, betas, bias_correction, capturable, differentiable, eps, foreach, fp32_optimizer_states, "
    "fused, lr, max_grad_norm, maximize, set_grad_none, torch_adam, weight_decay"
)
NAMES = "Adam, AdamW, SGD"
BUILD_IT = "Build it yourself, after wrap_model, and pass it to TrainStep."
UNCONVERTED = "Change the value; JSON types are not converted."

BAD = [
    ({}, "type: found no such key; valid: a value. Add it: it has no default."),
    ({"params": {"no": 1}}, "type: found no such key; valid: a value. Add it: it has no default."),
    ({"type": 3}, f"type: found int 3; valid: {NAMES}. Name one of them."),
    ({"type": "Lamb"}, f"type: found 'Lamb', which zeroamp does not build; valid: {NAMES}. {BUILD_IT}"),
    ({"type": "onebitadam"}, f"type: found 'onebitadam', which zeroamp does not build; valid: {NAMES}. {BUILD_IT}"),
    ({"type": "RMSprop"}, f"type: found 'RMSprop', which zeroamp does not build; valid: {NAMES}. {BUILD_IT}"),
    ({"type": "AdmaW"}, f"type: found 'AdmaW', which no optimizer is called; valid: {NAMES}. Did you mean 'AdamW'?"),
    ({"type": "zzz"}, f"type: found 'zzz', which no optimizer is called; valid: {NAMES}. {BUILD_IT}"),
    (
        {"type": "SGD", "legacy": True},
        "legacy: found a key that neither DeepSpeed 0.19.8 nor zeroamp has; valid: legacy_fusion, params, type. "
        "Did you mean 'legacy_fusion'?",
    ),
    (
        {"type": "AdamW", "params": {"weight_decy": 0.1}},
        f"params.weight_decy: found a key that zeroamp does not support; valid: {ADAM_KEYS}. "
        "Did you mean 'weight_decay'?",
    ),
    (
        {"type": "Adam", "params": {"momentum": 0.1}},
        f"params.momentum: found a key that zeroamp does not support; valid: {ADAM_KEYS}. "
        "Remove it: zeroamp refuses what it would otherwise ignore.",
    ),
    (
        {"type": "AdamW", "params": {"max_grad_norm": 1.0}},
        'params.max_grad_norm: found float 1.0; valid: null. Write "gradient_clipping" at the top level.',
    ),
    (
        {"type": "Adam", "params": {"bias_correction": False}},
        "params.bias_correction: found bool False; valid: true. "
        "Remove it: torch's Adam always corrects the bias of its means.",
    ),
    (
        {"type": "AdamW", "params": {"adam_w_mode": False}},
        'params.adam_w_mode: found bool False; valid: true. Write "type": "Adam": DeepSpeed ignores the key here.',
    ),
    (
        {"type": "Adam", "params": {"fp32_optimizer_states": False}},
        "params.fp32_optimizer_states: found bool False; valid: null or true. "
        "Remove it: optimizer state has the dtype of the parameters, fp32.",
    ),
    (
        {"type": "Adam", "params": {"foreach": True, "fused": True}},
        "params.fused: found true beside foreach; valid: at most one of foreach and fused. Remove one of them.",
    ),
    (
        {"type": "SGD", "params": {"nesterov": True}},
        "params.nesterov: found true with momentum 0.0 and dampening 0.0; valid: momentum above 0 and dampening 0. "
        "Set momentum, or remove nesterov.",
    ),
    (
        {"type": "SGD", "params": {"nesterov": True, "momentum": 0.9, "dampening": 0.5}},
        "params.nesterov: found true with momentum 0.9 and dampening 0.5; valid: momentum above 0 and dampening 0. "
        "Set momentum, or remove nesterov.",
    ),
    (
        {"type": "SGD", "params": {"lr": "1e-3"}},
        f"params.lr: found str '1e-3'; valid: a valid number. {UNCONVERTED}",
    ),
    (
        {"type": "SGD", "params": {"lr": True}},
        f"params.lr: found bool True; valid: a number, which a boolean is not. {UNCONVERTED}",
    ),
    (
        {"type": "Adam", "params": {"betas": [0.9, 1]}},
        "params.betas.1: found int 1; valid: less than 1. Change the value.",
    ),
    (
        {"type": "Adam", "params": {"betas": [0.9]}},
        "params.betas.1: found no such key; valid: a value. Add it: it has no default.",
    ),
    (
        {"type": "SGD", "params": 3},
        f"params: found int 3; valid: an object of keys. {UNCONVERTED}",
    ),
]


@pytest.mark.parametrize(("block", "words"), BAD, ids=str)
def test_bad_input_is_refused_by_name(block, words):
    with pytest.raises(ConfigError) as caught:
        policy_from_config({"optimizer": block})
    assert str(caught.value) == f"optimizer.{words}"


@pytest.mark.skipif(hasattr(torch.optim, "Lion"), reason="this torch has Lion")
def test_lion_is_refused_because_torch_has_none():
    with pytest.raises(ConfigError, match="optimizer.type: found 'Lion', which this torch does not have"):
        optimizer(type="Lion")


def test_every_bad_key_of_params_has_a_line():
    with pytest.raises(ConfigError) as caught:
        optimizer(type="Adam", params={"lr": -1, "lrr": 1, "max_grad_norm": 1.0, "betas": [0.9, 2]})
    lines = str(caught.value).splitlines()
    places = {line.partition(": found")[0] for line in lines}
    assert places == {f"optimizer.params.{key}" for key in ("lr", "lrr", "max_grad_norm", "betas.1")}


@pytest.mark.parametrize(
    "block",
    [
        OptimizerBlock(type="adam", params={"lr": 1, "betas": [0.8, 0.9], "torch_adam": True}),
        OptimizerBlock(type="AdamW", params={"weight_decay": 0.1, "fused": True}),
        OptimizerBlock(type="SGD", params={"momentum": 0.9, "nesterov": True}, legacy_fusion=True),
    ],
    ids=str,
)
def test_what_is_written_out_reads_back_as_the_same_block(block):
    written = json.loads(json.dumps(block.model_dump(mode="json", exclude_none=True)))
    again = type(block).model_validate(written)
    assert again == block
    assert type(again.params) is type(block.params)
    assert hash(again) == hash(block)


@pytest.mark.parametrize("block", [*OPTIMIZER_PARAMS.values(), OptimizerBlock])
def test_every_key_has_a_class_and_a_note(block):
    keys = list(iter_keys(block))
    assert [key.path for key in keys] == list(block.model_fields)
    assert all(key.key_class.note for key in keys)
    assert any(isinstance(key.key_class, Honoured) for key in keys)


@pytest.mark.parametrize("block", OPTIMIZER_PARAMS.values())
def test_the_default_of_an_unsupported_key_asks_for_nothing(block):
    for key in iter_keys(block):
        if isinstance(key.key_class, Unsupported):
            assert key.default in key.key_class.off, key.path
