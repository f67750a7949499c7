"""The ledger's bytes: by class, group and parameter, in text, Markdown and JSON, with and without the ranks."""

import json

import pytest
import torch
from torch import nn

import zeroamp
from tests.measuring.traffic import traffic_rows
from tests.models.small import ConvNet, Encoder, Llama, Moe
from tests.processes.training import config, wrapped
from zeroamp.dry_run.planned_traffic import plan_traffic
from zeroamp.ledger.rows import PER_RANK, PER_STEP
from zeroamp.planning.mesh import Ranks


def ledger(cls=lambda: Llama(tied=True), ranks=None, wrap=None, **options):
    with torch.device("meta"):
        model = cls()
    plan = zeroamp.build_plan(model, zeroamp.policy_from_config(config(**options)), wrap)
    return zeroamp.Ledger(plan=plan, **(ranks or {}))


@pytest.mark.parametrize("ranks", [{}, {"num_shards": 4}, {"num_shards": 2, "num_replicas": 3}], ids=str)
@pytest.mark.parametrize("cls", [lambda: Llama(tied=True), ConvNet, Encoder, Moe])
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


@pytest.mark.parametrize(("dtype", "size"), [(None, 4), ("bf16", 2)])
def test_gradients_are_whole_at_stages_0_and_1_with_accumulation(dtype, size):
    more = {} if dtype is None else {"data_types": {"grad_accum_dtype": dtype}}
    for stage, shards in ((0, 1), (1, 2)):
        rows = ledger(ranks={"num_shards": shards}, stage=stage, accumulation=2, **more).to_dict()["groups"]
        assert rows[1]["gradient_bytes_per_rank"] == 4 * 10_272 // shards + size * 10_272
    rows = ledger(ranks={"num_shards": 2}, stage=2, accumulation=2, **more).to_dict()["groups"]
    assert rows[1]["gradient_bytes_per_rank"] == 4 * 10_272 // 2


def _stored(stage):
    """Bytes of the stored shards: as promised, and as FSDP2 holds them."""
    model = wrapped("conv", config(stage))
    promised = _sum(zeroamp.explain(model).to_dict()["groups"], PER_RANK[0])
    return promised, sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_stored_bytes_are_those_that_fsdp2_holds(ranks4, stage):
    for promised, held in ranks4.run(_stored, stage):
        assert promised == held


def test_frozen_parameters_cost_no_gradient():
    def build():
        model = Llama(tied=True)
        model.blocks[1].requires_grad_(False)
        return model

    rows = {row["parameter"]: row for row in ledger(build, {"num_shards": 2}).to_dict()["parameters"]}
    frozen, trained = rows["blocks.1.qkv.weight"], rows["blocks.0.qkv.weight"]
    assert (frozen["reduced_bytes_per_step"], frozen["gradient_bytes_per_rank"]) == (0, 0)
    assert frozen["all_gathered_bytes_per_step"] == trained["all_gathered_bytes_per_step"] > 0
    assert trained["reduced_bytes_per_step"] > 0


def test_without_the_ranks_the_text_says_so_and_has_no_bytes_per_rank():
    text = " ".join(str(ledger()).split())
    assert "The number of ranks is not known" in text
    assert "without the padding to the ranks" in text
    assert "GiB" not in text
    assert not set(PER_RANK) & set(ledger().group_rows()[0])
    text = " ".join(str(ledger(ranks={"num_shards": 2})).split())
    assert "not known" not in text
    assert "padding included" in text
    assert "| shards per rank KiB |" in " ".join(ledger(ranks={"num_shards": 2}).to_markdown().split())
    assert set(PER_RANK) < set(ledger(ranks={"num_shards": 2}).parameter_rows()[0])


def test_stage_0_knows_its_shards_without_ranks():
    as_dict = ledger(stage=0).to_dict()
    assert as_dict["groups"][1]["stored_bytes_per_rank"] == 4 * 10_272
    assert as_dict["groups"][1]["reduced_bytes_per_step"] == 4 * 10_272, "one all-reduce in fp32"
    assert as_dict["groups"][1]["all_gathered_bytes_per_step"] == 0


def test_markdown_has_the_tables_of_the_text_and_of_the_parameters_if_asked():
    book = ledger(ranks={"num_shards": 2})
    text = book.to_markdown()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "### Dtypes between ranks",
        "### Module classes",
        "### Groups",
    ]
    rows = [line for line in text.splitlines() if line.startswith("| blocks.0")]
    assert len(rows) == 1
    assert [cell.strip() for cell in rows[0].split("|")[1:6]] == ["blocks.0 … blocks.2", "3", "unit", "5", "10,272"]
    assert "embed.weight" not in text
    assert "| embed.weight " in book.to_markdown(per_parameter=True)


def test_the_dict_is_json_with_the_ranks_and_the_traffic():
    book = ledger(ranks={"num_shards": 2, "num_replicas": 2}, stage=3)
    as_dict = json.loads(json.dumps(book.to_dict(), allow_nan=False))
    assert as_dict["ranks"] == {"num_shards": 2, "num_replicas": 2}
    assert {
        "collective": "all_to_all",
        "dtype": "bf16",
        "group": "blocks.1",
        "calls": 1,
        "bytes": 2 * 10_272,
    } in as_dict["traffic"]


def _explained(mesh_shape, stage):
    model = wrapped("conv", config(stage), mesh_shape=mesh_shape)
    book = zeroamp.explain(model)
    ranks = Ranks(num_shards=book.num_shards, num_replicas=book.num_replicas)
    return (book.num_shards, book.num_replicas), traffic_rows(plan_traffic(book.plan, ranks)), book.to_dict()["traffic"]


@pytest.mark.parametrize(
    ("mesh_shape", "stage", "ranks"), [(None, 3, (4, None)), (None, 0, (1, 4)), ((2, 2), 3, (2, 2))]
)
def test_explain_takes_the_ranks_from_the_mesh(ranks4, mesh_shape, stage, ranks):
    found, planned, rows = ranks4.run(_explained, mesh_shape, stage)[0]
    assert found == ranks
    assert sorted(row["bytes"] for row in rows) == sorted(num_bytes for _, num_bytes in planned.values())


def test_the_accumulation_dtype_is_fp32_where_nothing_accumulates():
    more = {"data_types": {"grad_accum_dtype": "bf16"}}
    for accumulation, expected in ((1, "fp32"), (2, "bf16")):
        rows = ledger(stage=2, accumulation=accumulation, **more).group_rows()
        assert {row["accumulate"] for row in rows} == {expected}


def test_two_classes_that_own_one_parameter_are_named_once_each():
    def build():
        layers = [nn.Linear(4, 4) for _ in range(3)]
        for layer in layers:
            layer.weight = layers[0].weight
        return nn.Sequential(*layers)

    assert [row["class"] for row in ledger(build, stage=1).to_dict()["classes"]] == ["Linear"]


@pytest.mark.parametrize("columns", [80, 100])
def test_no_line_is_wider_than_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    book = ledger(ranks={"num_shards": 2})
    assert max(map(len, f"{book}\n{book.per_parameter()}".splitlines())) <= columns
    assert "embed.weight" in book.per_parameter()
