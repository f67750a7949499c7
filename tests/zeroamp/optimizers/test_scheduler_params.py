"""The block `scheduler`: names, each refusal, and the round trip."""

import json

import pytest

from zeroamp import ConfigError, policy_from_config
from zeroamp.optimizers.scheduler_params import SCHEDULER_PARAMS
from zeroamp.policies.schema import SchedulerBlock
from zeroamp.policies.schema.keys import Honoured, Unsupported, iter_keys


def test_without_the_block_the_policy_has_none():
    assert policy_from_config({}).scheduler is policy_from_config({"scheduler": None}).scheduler is None


def test_the_type_is_written_as_deepspeed_writes_it_whatever_the_case():
    assert policy_from_config({"scheduler": {"type": "warmuplr"}}).scheduler.type == "WarmupLR"


def test_falling_curves_need_their_total():
    required = {
        name: {key for key, field in block.model_fields.items() if field.is_required()}
        for name, block in SCHEDULER_PARAMS.items()
    }
    assert required == {
        "WarmupCosineLR": {"total_num_steps"},
        "WarmupDecayLR": {"total_num_steps"},
        "WarmupLR": set(),
    }


BAD = [
    ({"params": {"no": 1}}, "type", "is missing", "Add it"),
    ({"type": None}, "type", "is null", "Name one of them"),
    ({"type": "StepLR"}, "type", 'is "StepLR"', "Build the scheduler yourself and pass it to TrainStep(scheduler=)"),
    ({"type": "WarmupCosLR"}, "type", 'is "WarmupCosLR"', "WarmupCosineLR"),
    ({"type": "OneCycle"}, "type", 'is "OneCycle"', "CyclicLR in place of OneCycle"),
    ({"type": "WarmupDecayLR", "params": {}}, "params.total_num_steps", "is missing", "Add it"),
    (
        {"type": "WarmupLR", "params": {"last_batch_iteration": 3}},
        "params.last_batch_iteration",
        "is 3",
        "Remove it, and pass the saved state to",
    ),
    (
        {"type": "WarmupLR", "params": {"warmup_type": "cosine"}},
        "params.warmup_type",
        'is "cosine"',
        "Change the value",
    ),
    ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "params.warmup_num_steps", "is 0", "Change the value"),
    ({"type": "WarmupLR", "params": {"warmup_min_lr": []}}, "params.warmup_min_lr", "is []", "Change the value"),
    (
        {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, True]}},
        "params.warmup_max_lr",
        "is [0.1, true]",
        "Change the value",
    ),
    (
        {"type": "WarmupLR", "params": {"warmup_max_lr": float("inf")}},
        "params.warmup_max_lr",
        "is Infinity",
        "Change the value",
    ),
    (
        {"type": "WarmupLR", "params": {"warmup_min_lr": float("nan")}},
        "params.warmup_min_lr",
        "is NaN",
        "Change the value",
    ),
]


@pytest.mark.parametrize(("block", "key", "value", "remedy"), BAD, ids=str)
def test_bad_input_is_refused_with_key_value_and_remedy(block, key, value, remedy):
    with pytest.raises(ConfigError) as caught:
        policy_from_config({"scheduler": block})
    text = str(caught.value)
    assert text.startswith(f"scheduler.{key} ")
    assert value in text
    assert remedy in text


@pytest.mark.parametrize(
    "block",
    [
        SchedulerBlock(type="WarmupLR"),
        SchedulerBlock(type="WarmupDecayLR", params={"total_num_steps": 9, "warmup_max_lr": [1, 2]}),
        SchedulerBlock(type="WarmupCosineLR", params={"total_num_steps": 9}),
    ],
    ids=str,
)
def test_what_is_written_out_reads_back_as_the_same_block(block):
    written = json.loads(json.dumps(block.model_dump(mode="json", exclude_none=True)))
    again = type(block).model_validate(written)
    assert again == block
    assert type(again.params) is type(block.params)
    assert hash(again) == hash(block)


@pytest.mark.parametrize("block", [*SCHEDULER_PARAMS.values(), SchedulerBlock])
def test_every_key_has_a_class_and_a_note(block):
    keys = list(iter_keys(block))
    assert [key.path for key in keys] == list(block.model_fields)
    assert all(key.key_class.note for key in keys)
    assert any(isinstance(key.key_class, Honoured) for key in keys)


@pytest.mark.parametrize("block", SCHEDULER_PARAMS.values())
def test_the_default_of_an_unsupported_key_asks_for_nothing(block):
    for key in iter_keys(block):
        if isinstance(key.key_class, Unsupported):
            assert key.default in key.key_class.off, key.path


@pytest.mark.parametrize("value", [1e308, 1e16])
def test_numbers_whose_products_are_infinite_are_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"scheduler\.params\.warmup_max_lr must be "):
        policy_from_config({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": value}}})
