"""The dtype ledger: the seven dtypes of every group and parameter, and their bytes per step and per rank."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.ledger.dtype_differences import Verification
from zeroamp.ledger.rows import (
    DTYPE_COLUMNS,
    PER_RANK,
    PER_STEP,
    SHARD_DIM,
    SHARD_DIMS,
    LedgerRows,
    cells,
    fold,
    ledger_rows,
)
from zeroamp.ledger.tables import Row, Table, TableStyle, document, gb, gib, render
from zeroamp.ledger.verify_step import verify
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.mesh_axes import ranks_of_axes
from zeroamp.planning.plan import Plan
from zeroamp.policies.errors import some_of
from zeroamp.training.loss import LossFunction
from zeroamp.wrapping.state import wrap_state

_STEP_NOTE = (
    "Per step: bytes of the unsharded tensors that one optimizer step moves on each rank, {padding}, as "
    "zeroamp.traffic(model) counts them."
)
_RANK_NOTE = (
    "Per rank: the stored shard, the unsharded parameters while they exist, the gradients. Not counted: optimizer "
    "state, activations, buffers, staging of collectives."
)
_UNKNOWN_NOTE = (
    "The number of ranks is not known, so bytes per rank and the all-reduce over replicas of shards are left out. Pass "
    "Ledger(plan=..., num_shards=...), or --world-size."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Dtypes and bytes of the groups and parameters of a plan. `print` shows them by pair of dtypes, class and group.

    `per_parameter` returns a text with every parameter. `explain` returns the ledger of a wrapped model.
    """

    plan: Plan
    num_shards: int | None = None
    """Number of ranks that a parameter is sharded over. None: not known (at stage 0 it is always 1)."""
    num_replicas: int | None = None
    """Number of ranks that hold the same shard, if the mesh has a replica axis (2-D). None: no such axis."""
    num_tensor: int = 1
    """Number of ranks of the tensor axis. Of parameters distributed over it, sizes are those of one rank's part."""
    num_expert: int = 1
    """Number of ranks over which expert parallelism distributes the experts."""

    def __str__(self) -> str:
        """Return the summary, one row per module class and dtypes, and one per group; equal neighbours share one."""
        return self._document(self._tables())

    def __repr__(self) -> str:
        """Return mode, stage, units, groups and parameters in one line."""
        return f"Ledger({self.title().removeprefix('zeroamp: ')})"

    def _repr_html_(self) -> str:
        """Return the tables that `print` shows, for a notebook."""
        return self._document(self._tables(), "html")

    def per_parameter(self, style: TableStyle = "simple") -> str:
        """Return three tables of one row per parameter: dtypes; bytes; class, group and the reason for the dtypes.

        With the style "github", return one Markdown table, and with "html" one of HTML.
        """
        if style != "simple":
            return _render(self.parameter_rows(), style)
        byte_columns = ("elements", *self._byte_columns)
        tables = _parts(self.parameter_rows(), "parameter", (SHARD_DIM, *DTYPE_COLUMNS), byte_columns)
        return "\n\n".join(_render(table) for table in tables)

    def to_markdown(self, *, per_parameter: bool = False) -> str:
        """Return what `print` shows, as Markdown. `per_parameter` adds a table of all parameters."""
        tables = {**self._tables(), "Groups": fold(self.group_rows())}  # Markdown may be wide: one table of the groups
        del tables["Bytes of the groups"]
        tables |= {"Parameters": self.parameter_rows()} if per_parameter else {}
        return self._document(tables, "github")

    def summary_rows(self) -> list[dict[str, Any]]:
        """Return one dict per pair of all-gather and reduction dtype.

        Each has the numbers of parameters and elements, the GB of one all-gather, and the GB of all all-gathers and of
        all reductions of one optimizer step.
        """
        return [
            {
                "all-gathered in": row["param"],
                "reduced in": row["communication"],
                "params": row["params"],
                "elements": row["elements"],
                "GB per all-gather": gb(row["bytes_per_all_gather"]),
                "GB all-gathered per step": gb(row[PER_STEP[0]]),
                "GB reduced per step": gb(row[PER_STEP[1]]),
            }
            for row in self._rows().summary
        ]

    def class_rows(self) -> list[dict[str, Any]]:
        """Return one dict per (classes of the owning modules, seven dtypes): parameters, elements and bytes."""
        columns = ("class", "params", "elements", *DTYPE_COLUMNS, *self._byte_columns)
        return [cells(row, columns) for row in self._rows().classes]

    def group_rows(self) -> list[dict[str, Any]]:
        """Return one dict per group: name, kind, numbers of parameters and elements, the seven dtypes, and bytes.

        Bytes per step count all all-gathers and reductions of one optimizer step: see `ledger/planned_traffic.py`.
        Bytes per rank need `num_shards`, and count the stored shard (padding included), the unsharded parameters, and
        the gradients (a shard; at stages 0 and 1 with accumulation, the unsharded sums too). If any parameter is
        sharded over another dimension than 0, each dict also has the sharded dimensions.
        """
        columns = ("kind", "params", "elements", *DTYPE_COLUMNS, *self._byte_columns)
        other_dims = self._other_dims()
        return [
            {
                "group": row["group"],
                **({SHARD_DIMS: ", ".join(map(str, row[SHARD_DIMS])) or "-"} if other_dims else {}),
                **cells(row, columns),
            }
            for row in self._rows().groups
        ]

    def parameter_rows(self) -> list[dict[str, Any]]:
        """Return one dict per parameter: FQN, unit, group, class, elements, the seven dtypes, bytes and "why".

        If any parameter is sharded over another dimension than 0, each dict also has the sharded dimension.
        """
        dim = (SHARD_DIM,) if self._other_dims() else ()
        columns = ("parameter", "unit", "group", "class", "elements", *dim, *DTYPE_COLUMNS, *self._byte_columns, "why")
        return [cells(row, columns) for row in self._rows().parameters]

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as values that JSON can hold. Later versions may add keys, but do not remove any.

        dtypes are short names, or None where a frozen parameter has none. Bytes are None if the ranks are not known.
        "config" gives an equal policy. "units" are the FQNs below the root. "summary" has the totals per pair of
        all-gather and reduction dtype, "classes" those per module class and dtypes. "groups" and "parameters" have one
        row each. "traffic" is what `zeroamp.traffic` counts in one optimizer step. "low_share" is the part of the
        trainable elements that is all-gathered in the mode's low precision.
        """
        rows = self._rows()
        return {
            "config": self.plan.policy.to_config(),
            "units": list(self.plan.units),
            "summary": rows.summary,
            "groups": rows.groups,
            "parameters": rows.parameters,
            "ranks": {"num_shards": self.num_shards, "num_replicas": self.num_replicas},
            "classes": rows.classes,
            "traffic": rows.traffic,
            "low_share": self.plan.low_share,
        }

    def verify(self, model: nn.Module, batch: object, *, loss_fn: LossFunction | None = None) -> Verification:
        """Run one optimizer step on `batch` without an update and compare every dtype that occurs with this ledger.

        Call it on all ranks. It runs as many forwards and backwards as the config accumulates, all on `batch`, and then
        AdamW on copies. It observes the dtypes of stored and unsharded parameters, of the ops that consume them, of raw
        gradients, collectives, sums and optimizer state. Parameters, gradients, buffers, random states and counters are
        restored, also if the step raises. Compiled modules run eagerly. Where a parameter's compute dtype is "per op",
        the dtypes of its ops are reported, but not compared. Modules that do not run are not checked.

        Args:
            model: the wrapped model of this ledger, between two optimizer steps.
            batch: a tensor, a tuple of arguments or a mapping of keyword arguments of the model's forward.
            loss_fn: computes a scalar loss from the model's output. Default: its `.loss`, or the output itself.

        Raises:
            PrecisionError: on all ranks, naming parameter, module, boundary, the expected and the observed dtype.
            StepError: there are gradients (between two micro-batches, for example), `batch` has another type, or there
                is no scalar loss.
            WrapError: the model is not wrapped, the ledger is another model's, or the mesh has a tensor or expert axis.
        """
        return verify(self.plan, model, batch, loss_fn)

    def _document(self, tables: dict[str, list[Row]], style: TableStyle = "simple") -> str:
        drawn = [Table(title, [_in_units(row) for row in rows]) for title, rows in tables.items()]
        return document([self.title(), *drawn, self._notes()], style)

    def _tables(self) -> dict[str, list[Row]]:
        groups = fold(self.group_rows())
        return {
            "Dtypes between ranks": self.summary_rows(),
            "Module classes": _without(self.class_rows(), self._byte_columns),
            "Groups": _without(groups, self._byte_columns),
            "Bytes of the groups": _only(groups, ("group", "groups", *self._byte_columns)),
        }

    def _rows(self) -> LedgerRows:
        return ledger_rows(self.plan, self._ranks)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(
            num_shards=self.num_shards,
            num_replicas=self.num_replicas,
            num_tensor=self.num_tensor,
            num_expert=self.num_expert,
        )

    @property
    def _byte_columns(self) -> tuple[str, ...]:
        return PER_STEP if self._ranks.shards(self.plan.policy) is None else (*PER_STEP, *PER_RANK)

    def title(self) -> str:
        """Return the sentence above the tables: mode, stage, units, groups and parameters."""
        policy, units = self.plan.policy, self.plan.units
        numel = sum(group.numel for group in self.plan.all_groups)
        low = f", {text}" if (text := self.plan.describe_low_share()) else ""
        return (
            f"zeroamp: mode {policy.mode}, ZeRO stage {policy.stage}, {len(units)} units below the root, "
            f"{len(self.plan.all_groups)} groups, {numel:,} parameters{low}"
        )

    def _notes(self) -> str:
        if self._ranks.shards(self.plan.policy) is None:
            return f"{_STEP_NOTE.format(padding='without the padding to the ranks')}\n{_UNKNOWN_NOTE}"
        notes = [_STEP_NOTE.format(padding="padding included"), _RANK_NOTE]
        for dim, names in self._other_dims().items():
            notes.append(f"Sharded over dimension {dim}, where dimension 0 would be padded: {some_of(names)}.")
        return "\n".join(notes)

    def _other_dims(self) -> dict[int, list[str]]:
        """Return the parameters that are sharded over another dimension than 0, by dimension."""
        num_shards = self._ranks.shards(self.plan.policy)
        found: dict[int, list[str]] = {}
        for group in self.plan.groups:
            for param in group.params:
                if dim := param.shard_dim(num_shards):
                    found.setdefault(dim, []).append(param.fqn)
        return dict(sorted(found.items()))


_UNITS: dict[str, tuple[str, Callable[[int], float | None]]] = {
    PER_STEP[0]: ("GB all-gathered per step", gb),
    PER_STEP[1]: ("GB reduced per step", gb),
    PER_RANK[0]: ("GiB of shards per rank", gib),
    PER_RANK[1]: ("GiB unsharded per rank", gib),
    PER_RANK[2]: ("GiB of gradients per rank", gib),
}
"""Column of bytes -> its header in a table, and the function that converts bytes to the printed unit."""


def _render(rows: list[Row], style: TableStyle = "simple") -> str:
    return render([_in_units(row) for row in rows], style)


def _in_units(row: Row) -> Row:
    """Return a row with its bytes as GB or GiB."""
    shown: Row = {}
    for key, value in row.items():
        header, convert = _UNITS.get(key, (key, None))
        shown[header] = value if convert is None or not isinstance(value, int) else convert(value)
    return shown


def _only(rows: list[Row], columns: tuple[str, ...]) -> list[Row]:
    return [{key: row[key] for key in columns if key in row} for row in rows]


def _without(rows: list[Row], columns: tuple[str, ...]) -> list[Row]:
    return [{key: value for key, value in row.items() if key not in columns} for row in rows]


def _parts(rows: list[Row], name: str, *columns: tuple[str, ...]) -> list[list[Row]]:
    """Split the rows into several tables: one per tuple of columns, and one of the other columns."""
    rest = tuple(key for each in columns for key in each)
    return [*(_only(rows, (name, *each)) for each in columns), _without(rows, rest)]


def explain(model: nn.Module) -> Ledger:
    """Return the dtype ledger of a model that `wrap_model` returned.

    Raises:
        WrapError: the model is not wrapped.

    Examples:
        >>> policy = zeroamp.policy_from_config({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
        >>> model = zeroamp.wrap_model(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), policy)
        >>> ledger = zeroamp.explain(model)
        >>> {row["parameter"]: row["param"] for row in ledger.parameter_rows()}
        {'0.weight': 'bf16', '0.bias': 'bf16', '1.weight': 'fp32', '1.bias': 'fp32'}
        >>> seen = ledger.verify(model, torch.ones(4, 8), loss_fn=lambda output: output.float().sum())
        >>> seen.is_traffic_as_planned
        True
    """
    state = wrap_state(model)
    return Ledger(plan=state.plan, **asdict(ranks_of_axes(state.axes)))


def traffic(model: nn.Module) -> Traffic:
    """Return the counters of a wrapped model's collectives: `.by_dtype()`, `.calls`, `.num_bytes`, `.reset()`.

    Raises:
        WrapError: the model is not wrapped.
    """
    return wrap_state(model).traffic
