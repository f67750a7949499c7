"""The block `optimizer`: defaults, names, each refusal, and the round trip."""

import json

import pytest
import torch

from zeroamp import ConfigError, policy_from_config
from zeroamp.optimizers.optimizer_params import OPTIMIZER_PARAMS
from zeroamp.policies.schema import OptimizerBlock
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


BAD = [
    ({}, "type", "is missing", "Add it"),
    ({"params": {"no": 1}}, "type", "is missing", "Add it"),
    ({"type": 3}, "type", "is 3", "Name one of them"),
    ({"type": "Lamb"}, "type", 'is "Lamb"', "Build the optimizer yourself"),
    ({"type": "onebitadam"}, "type", 'is "onebitadam"', 'Write "AdamW"'),
    ({"type": "RMSprop"}, "type", 'is "RMSprop"', "Build the optimizer yourself"),
    ({"type": "AdmaW"}, "type", 'is "AdmaW"', "Did you mean 'AdamW'?"),
    ({"type": "zzz"}, "type", 'is "zzz"', "Build the optimizer yourself"),
    ({"type": "SGD", "legacy": True}, "legacy", "is a key of neither", "legacy_fusion"),
    ({"type": "AdamW", "params": {"weight_decy": 0.1}}, "params.weight_decy", "is not supported", "weight_decay"),
    (
        {"type": "Adam", "params": {"momentum": 0.1}},
        "params.momentum",
        "is not supported",
        "Remove it: zeroamp does not ignore unknown keys",
    ),
    (
        {"type": "AdamW", "params": {"max_grad_norm": 1.0}},
        "params.max_grad_norm",
        "is 1.0",
        'Write "gradient_clipping" at the top level.',
    ),
    (
        {"type": "Adam", "params": {"bias_correction": False}},
        "params.bias_correction",
        "is false",
        "Remove it: torch's Adam always corrects",
    ),
    ({"type": "AdamW", "params": {"adam_w_mode": False}}, "params.adam_w_mode", "is false", 'Write "type": "Adam"'),
    (
        {"type": "Adam", "params": {"fp32_optimizer_states": False}},
        "params.fp32_optimizer_states",
        "is false",
        "Remove it: optimizer state has the",
    ),
    ({"type": "Adam", "params": {"foreach": True, "fused": True}}, "params.fused", "is true", "Remove one of them"),
    (
        {"type": "SGD", "params": {"nesterov": True}},
        "params.nesterov",
        "is true",
        "Nesterov's momentum needs momentum above 0 and dampening 0",
    ),
    (
        {"type": "SGD", "params": {"nesterov": True, "momentum": 0.9, "dampening": 0.5}},
        "params.nesterov",
        "is true",
        "Nesterov's momentum needs momentum above 0 and dampening 0",
    ),
    ({"type": "SGD", "params": {"lr": "1e-3"}}, "params.lr", 'is the string "1e-3"', "Remove the quotes"),
    ({"type": "SGD", "params": {"lr": True}}, "params.lr", "is true", "Change the value"),
    ({"type": "Adam", "params": {"betas": [0.9, 1]}}, "params.betas.1", "is 1", "Change the value"),
    ({"type": "Adam", "params": {"betas": [0.9]}}, "params.betas.1", "is missing", "Add it"),
    ({"type": "SGD", "params": 3}, "params", "is 3", "Change the value"),
]


@pytest.mark.parametrize(("block", "key", "value", "remedy"), BAD, ids=str)
def test_bad_input_is_refused_with_key_value_and_remedy(block, key, value, remedy):
    with pytest.raises(ConfigError) as caught:
        policy_from_config({"optimizer": block})
    text = str(caught.value)
    assert text.startswith(f"optimizer.{key} ")
    assert value in text
    assert remedy in text


def test_every_bad_key_of_params_has_a_line():
    with pytest.raises(ConfigError) as caught:
        optimizer(type="Adam", params={"lr": -1, "lrr": 1, "max_grad_norm": 1.0, "betas": [0.9, 2]})
    lines = str(caught.value).splitlines()
    places = {line.split()[0] for line in lines}
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
