"""The ledger says what was planned, for every parameter."""

import json

import torch

import zeroamp
from tests.models.small import Llama
from tests.processes.training import config, wrapped


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
        "stored": "fp32",
        "param": "bf16",
        "compute": "bf16",
        "gradient": "bf16",
        "communication": "bf16",
        "accumulate": "fp32",
        "optimizer": "fp32",
        "all_gathered_bytes_per_step": 2 * 2 * 10_272,
        "reduced_bytes_per_step": 2 * 10_272,
        "stored_bytes_per_rank": 4 * 10_272 // 2,
        "unsharded_bytes_per_rank": 2 * 10_272,
        "gradient_bytes_per_rank": 4 * 10_272 // 2,
    }
    embed = next(row for row in parameters if row["parameter"] == "embed.weight")
    assert embed["why"] == "not safe: owned by Embedding (embed), tied with head.weight"
    assert sum(row["elements"] for row in parameters) == sum(row["elements"] for row in groups)
    words = " ".join(text.split())
    assert words.startswith("zeroamp: mode autocast, ZeRO stage 3, 3 units below the root, 5 groups, 33,600 parameters")
    assert "10,272" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("bf16  ")]
    assert row == ["bf16", "bf16", "15", "30,816", "60.19", "120.38", "60.19"]  # stage 3 all-gathers twice
    assert "blocks.0 … blocks.2" in text  # three equal rows are one
    assert "blocks.1" not in text
    assert "safe: owned by Linear" in long_text


def test_a_frozen_parameter_has_no_gradient_dtypes(ranks2):
    rows = ranks2.run(_frozen)[0]
    assert {row["communication"] for row in rows if "qkv" in row["parameter"]} == {"-"}


def _frozen():
    from tests.models.small import build

    model = build("llama_tied")
    for block in model.blocks:
        block.qkv.requires_grad_(False)
    return zeroamp.explain(zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)))).parameter_rows()


def test_an_unwrapped_model_is_refused():
    import pytest
    from torch import nn

    with pytest.raises(zeroamp.WrapError, match="Linear.* is not wrapped"):
        zeroamp.explain(nn.Linear(1, 1))


def _meta_ledger(**options):
    with torch.device("meta"):
        model = Llama(tied=True)
    model.blocks[1].requires_grad_(False)
    return zeroamp.Ledger(plan=zeroamp.build_plan(model, zeroamp.policy_from_config(config(**options))))


KEYS = ["config", "units", "summary", "groups", "parameters", "ranks", "classes", "traffic", "low_share"]


def test_as_a_dict_it_is_what_json_holds_under_stable_keys():
    as_dict = _meta_ledger(comm="fp32", clip=0.5).to_dict()
    assert json.loads(json.dumps(as_dict, allow_nan=False)) == as_dict
    assert list(as_dict) == KEYS
    assert as_dict["units"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert zeroamp.policy_from_config(as_dict["config"]) == _meta_ledger(comm="fp32", clip=0.5).plan.policy


def test_the_dict_has_the_rows_of_the_tables_with_none_for_no_dtype():
    ledger = _meta_ledger()
    as_dict = ledger.to_dict()
    for rows, expected in (("groups", ledger.group_rows()), ("parameters", ledger.parameter_rows())):
        shared = [{key: "-" if row[key] is None else row[key] for key in expected[0]} for row in as_dict[rows]]
        assert shared == expected
    embed, frozen = (
        next(row for row in as_dict["parameters"] if row["parameter"] == fqn)
        for fqn in ("embed.weight", "blocks.1.qkv.weight")
    )
    assert (embed["aliases"], embed["shape"], embed["unit"]) == (["head.weight"], [80, 32], "root")
    assert (frozen["param"], frozen["gradient"], frozen["communication"], frozen["optimizer"]) == (
        "bf16",
        None,
        None,
        None,
    )
    group = next(row for row in as_dict["groups"] if row["group"] == "blocks.1")  # all of it is frozen
    assert (group["unit"], group["param"], group["communication"]) == ("blocks.1", "bf16", None)


def test_the_summary_of_the_dict_counts_bytes():
    summary = _meta_ledger().to_dict()["summary"]
    assert summary[0] == {
        "param": "bf16",
        "communication": "bf16",
        "params": 15,
        "elements": 30_816,
        "bytes_per_all_gather": 61_632,
        "all_gathered_bytes_per_step": 123_264,
        "reduced_bytes_per_step": 2 * (30_816 - 10_272),  # one block of three is frozen
        "stored_bytes_per_rank": None,
        "unsharded_bytes_per_rank": None,
        "gradient_bytes_per_rank": None,
    }
    assert summary[1]["bytes_per_all_gather"] == 4 * summary[1]["elements"]
