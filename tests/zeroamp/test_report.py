"""The ledger says what was planned, for every parameter."""

import zeroamp
from tests.training import config, wrapped


def _ledger(name, stage):
    ledger = zeroamp.explain(wrapped(name, config(stage)))
    return str(ledger), ledger.per_parameter(), ledger.group_rows(), ledger.parameter_rows()


def test_one_row_per_group_and_one_per_parameter(ranks2):
    text, long_text, groups, parameters = ranks2.run(_ledger, "llama_tied", 3)[0]
    assert [row["group"] for row in groups] == ["root", "blocks.0", "blocks.1", "blocks.2", "model-wide:fp32"]
    assert groups[1] == {
        "group": "blocks.0",
        "kind": "unit",
        "params": 5,
        "elements": 10_272,
        "storage": "fp32",
        "gather": "bf16",
        "compute": "bf16",
        "gradient": "bf16",
        "wire": "bf16",
        "accumulate": "fp32",
        "optimizer": "fp32",
    }
    embed = next(row for row in parameters if row["parameter"] == "embed.weight")
    assert embed["why"] == "not safe: owned by Embedding (embed), tied with head.weight"
    assert sum(row["elements"] for row in parameters) == sum(row["elements"] for row in groups)
    assert text.startswith("zeroamp: mode autocast, ZeRO stage 3, 3 units below the root, 5 groups, 33,600 parameters")
    assert "10,272" in text
    assert text.splitlines()[3].split() == ["bf16", "bf16", "15", "30,816", "0.1"]
    assert "blocks.0 … blocks.2" in text  # three equal rows are one
    assert "blocks.1" not in text
    assert "safe: owned by Linear" in long_text


def test_a_frozen_parameter_has_no_gradient_dtypes(ranks2):
    rows = ranks2.run(_frozen)[0]
    assert {row["wire"] for row in rows if "qkv" in row["parameter"]} == {"-"}


def _frozen():
    from tests.models import build

    model = build("llama_tied")
    for block in model.blocks:
        block.qkv.requires_grad_(False)
    return zeroamp.explain(zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)))).parameter_rows()


def test_an_unwrapped_model_is_refused():
    import pytest
    from torch import nn

    with pytest.raises(zeroamp.WrapError, match="a Linear that is not wrapped"):
        zeroamp.explain(nn.Linear(1, 1))
