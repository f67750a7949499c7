"""The ledger says what was planned: dtypes and bytes by class, group and parameter, in text and JSON."""

import json

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.small import ConvNet, Llama, Moe
from tests.processes.training import config, wrapped
from zeroamp.ledger.rows import PER_RANK, PER_STEP


def ledger(cls=lambda: Llama(tied=True), ranks=None, wrap=None, **options):
    with torch.device("meta"):
        model = cls()
    plan = zeroamp.build_plan(model, zeroamp.policy_from_config(config(**options)), wrap)
    return zeroamp.Ledger(plan=plan, **(ranks or {}))


def _of_wrapped():
    book = zeroamp.explain(wrapped("llama_tied", config(3)))
    return str(book), book.summary(), book.per_parameter(), book.group_rows(), book.parameter_rows()


def test_one_row_per_group_and_one_per_parameter(ranks2):
    text, summary, long_text, groups, parameters = ranks2.run(_of_wrapped)[0]
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
    assert words.startswith("zeroamp: mode autocast, ZeRO stage 3, 3 FSDP units below the root, 5 parameter groups, ")
    assert "10,272" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("bf16  ")]
    assert row == ["bf16", "bf16", "15", "30,816", "60.19", "120.38", "60.19"]  # stage 3 all-gathers twice
    of_one = "Groups (bytes are those of one group of a row)"
    headings = ["Dtypes between ranks", "Module classes", of_one]
    assert [line for line in text.splitlines() if line in headings] == headings
    assert text.startswith(f"{summary}\n\nModule classes")
    assert len(summary.splitlines()) <= 12
    assert "blocks.0 … blocks.2" in text  # three equal rows are one
    assert "embed.weight" not in text
    assert "blocks.1" not in text
    assert "safe: owned by Linear" in long_text


def test_an_unwrapped_model_is_refused():
    with pytest.raises(zeroamp.WrapError, match="Linear.* is not wrapped"):
        zeroamp.explain(nn.Linear(1, 1))


def _partly_frozen():
    model = Llama(tied=True)
    model.blocks[1].requires_grad_(False)
    return model


KEYS = ["config", "units", "summary", "groups", "parameters", "ranks", "classes", "traffic", "low_share"]


def test_as_a_dict_it_is_what_json_holds_under_stable_keys():
    book = ledger(_partly_frozen, {"num_shards": 2, "num_replicas": 2}, comm="fp32", clip=0.5)
    as_dict = book.to_dict()
    assert json.loads(json.dumps(as_dict, allow_nan=False)) == as_dict
    assert list(as_dict) == KEYS
    assert as_dict["units"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert as_dict["ranks"] == {"num_shards": 2, "num_replicas": 2}
    assert zeroamp.policy_from_config(as_dict["config"]) == book.plan.policy


def test_the_dict_has_the_rows_of_the_tables():
    """The dict has the rows of the tables with none for no dtype."""
    book = ledger(_partly_frozen, {"num_shards": 2})
    as_dict = book.to_dict()
    for rows, expected in (("groups", book.group_rows()), ("parameters", book.parameter_rows())):
        shared = [{key: "-" if row[key] is None else row[key] for key in expected[0]} for row in as_dict[rows]]
        assert shared == expected
    by_name = {row["parameter"]: row for row in as_dict["parameters"]}
    embed, frozen, trained = (by_name[fqn] for fqn in ("embed.weight", "blocks.1.qkv.weight", "blocks.0.qkv.weight"))
    assert (embed["aliases"], embed["shape"], embed["unit"]) == (["head.weight"], [80, 32], "root")
    assert frozen["param"] == "bf16"
    assert [frozen[key] for key in ("gradient", "communication", "optimizer")] == [None] * 3
    assert (frozen["reduced_bytes_per_step"], frozen["gradient_bytes_per_rank"]) == (0, 0)
    assert frozen["all_gathered_bytes_per_step"] == trained["all_gathered_bytes_per_step"] > 0
    assert trained["reduced_bytes_per_step"] > 0
    group = next(row for row in as_dict["groups"] if row["group"] == "blocks.1")  # all of it is frozen
    assert (group["unit"], group["param"], group["communication"]) == ("blocks.1", "bf16", None)


@pytest.mark.parametrize("ranks", [{}, {"num_shards": 2, "num_replicas": 3}], ids=str)
@pytest.mark.parametrize("cls", [ConvNet, Moe])
def test_classes_groups_parameters_and_traffic_have_the_same_totals(cls, ranks):
    for stage, accumulation in ((0, 2), (1, 3), (3, 1), (3, 2)):
        as_dict = ledger(cls, ranks, stage=stage, accumulation=accumulation, threshold=0).to_dict()
        for column in (*PER_STEP, *PER_RANK):
            sums = [_sum(as_dict[view], column) for view in ("summary", "classes", "groups", "parameters")]
            assert sums == [sums[0]] * 4
        calls = as_dict["traffic"]
        gathers = sum(row["bytes"] for row in calls if row["collective"] == "all_gather")
        others = sum(row["bytes"] for row in calls if row["collective"] != "all_gather" and row["group"] != "step")
        assert (gathers, others) == tuple(_sum(as_dict["groups"], column) for column in PER_STEP)


def _sum(rows, column):
    values = [row[column] for row in rows]
    return None if None in values else sum(values)


def test_a_row_per_class_of_owners_and_dtypes():
    rows = ledger(ranks={"num_shards": 2}).to_dict()["classes"]
    assert [(row["class"], row["params"], row["param"], row["compute"]) for row in rows] == [
        ("Embedding, Linear", 1, "fp32", "per op"),  # the tied weight
        ("RMSNorm", 7, "fp32", "per op"),
        ("Linear", 15, "bf16", "bf16"),
    ]
    assert rows[2]["stored_bytes_per_rank"] == 4 * 30_816 // 2


def test_bytes_per_rank_count_padded_rows():
    # Conv2d(3, 9, 3): 9 x 27 weights and 9 biases; 4 ranks hold 3 rows each, and 12 are gathered.
    rows = {
        row["parameter"]: row
        for row in ledger(ConvNet, {"num_shards": 4}, stage=3, wrap={"Sequential"}).to_dict()["parameters"]
    }
    row = rows["stages.0.0.weight"]
    assert row["stored_bytes_per_rank"] == row["gradient_bytes_per_rank"] == 3 * 27 * 4
    assert row["unsharded_bytes_per_rank"] == 12 * 27 * 2
    assert row["all_gathered_bytes_per_step"] == 2 * 12 * 27 * 2
    assert row["reduced_bytes_per_step"] == 12 * 27 * 2
    assert rows["head.bias"]["stored_bytes_per_rank"] == 2 * 4  # of 5 rows, 2 each


def _stored(stage, mesh_shape):
    """Shards, replicas, and bytes of the stored shards: as promised, and as FSDP2 holds them."""
    model = wrapped("conv", config(stage), mesh_shape=mesh_shape)
    book = zeroamp.explain(model)
    promised = _sum(book.to_dict()["groups"], PER_RANK[0])
    assert promised == sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
    return book.num_shards, book.num_replicas


@pytest.mark.parametrize(
    ("stage", "mesh_shape", "ranks"), [(3, None, (4, None)), (0, None, (1, 4)), (2, (2, 2), (2, 2))]
)
def test_explain_takes_the_ranks_from_the_mesh(ranks4, stage, mesh_shape, ranks):
    """Explain takes the ranks from the mesh and stored bytes are those that FSDP2 holds."""
    assert ranks4.run(_stored, stage, mesh_shape) == [ranks] * 4


def test_without_the_ranks_there_are_no_bytes_per_rank(monkeypatch):
    """Without the ranks the text says so and has no bytes per rank."""
    monkeypatch.setenv("COLUMNS", "300")
    text = " ".join(str(ledger()).split())
    assert "The number of ranks is not known" in text
    assert "without the padding to the ranks" in text
    assert "GiB" not in text
    assert not set(PER_RANK) & set(ledger().group_rows()[0])
    text = " ".join(str(ledger(ranks={"num_shards": 2})).split())
    assert "not known" not in text
    assert "padding included" in text
    assert "shards per rank KiB" in text
    assert set(PER_RANK) < set(ledger(ranks={"num_shards": 2}).parameter_rows()[0])
