"""The table of `docs/optimizers.md`: each optimizer on 2 ranks, trained, resumed and resharded."""

import functools
import importlib.util

import pytest

from tests.measuring.sources import ROOT
from tests.processes.optimizers import CASES, expected, tried
from tests.processes.training import same_bits
from tests.selection import slow_but

PAGE = ROOT / "docs" / "optimizers.md"
COLUMNS = ("optimizer", "updated", "against one process", "resume", "state", "other number of shards")
UPDATED = {"shards": "on shards", "muon": "whole matrices, each gathered once", "DTensors": "on DTensors"}
FAST = (
    "`torch.optim.Muon`, with AdamW",
    "`torch.optim.Adafactor`",
    "`torch.optim.SparseAdam`",
    "`torchao.optim.AdamW8bit`",
)


@functools.cache
def _rows():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    named = [(name, row[1:]) for row in cells for name in row[0].split("; ") if name in CASES]
    return {name: dict(zip(COLUMNS, (name, *row), strict=False)) for name, row in named}


def _row(name, found):
    row = dict.fromkeys(COLUMNS, "-") | {"optimizer": name}
    if found.stage is None:
        return row | {"updated": "refused"}
    updated = UPDATED[found.updated] + ", by `on_shards=True`" * CASES[name].on_shards
    if found.stage == 0:
        updated = "whole parameters at stage 0; refused at stages 1 to 3"
    is_equal = same_bits(found.parameters, expected(CASES[name])) == []
    reshard = {"": "yes", "not tried": "-"}.get(found.reshard)
    if reshard is None:
        assert "that cannot be resharded" in found.reshard
        reshard = "refused"
    return row | {
        "updated": updated,
        "against one process": "same bits" if is_equal else "other bits",
        "resume": "exact" if found.is_resumed_exactly else "other bits",
        "state": ", ".join(sorted(found.state)),
        "other number of shards": reshard,
    }


@pytest.mark.parametrize("name", slow_but(CASES, *FAST))
def test_an_optimizer_does_what_its_row_says(ranks2, tmp_path, name):
    library = CASES[name].library
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    found = ranks2.run(tried, name, tmp_path)[0]
    row = _row(name, found)
    assert _rows().get(name) == row, "| " + " | ".join(row.values()) + f" |   {found.refusal} {found.reshard}"


def test_every_optimizer_has_a_row():
    assert _rows().keys() == CASES.keys()
