"""The dtype ledger: the seven dtypes of every group and parameter, and their bytes per step and per rank."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.ledger.dtype_differences import Verification
from zeroamp.ledger.observed_optimizer import Optimizers
from zeroamp.ledger.rows import BYTES, DTYPE_COLUMNS, PER_STEP, SHARD_DIM, SHARD_DIMS, LedgerRows, cells, ledger_rows
from zeroamp.ledger.verify_step import verify
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.mesh_axes import ranks_of_axes
from zeroamp.planning.plan import Plan
from zeroamp.policies.numbers import counted
from zeroamp.training.loss import LossFunction
from zeroamp.wrapping.state import wrap_state


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
        from zeroamp.reporting.ledger_tables import ledger_text

        return ledger_text(self)

    def __repr__(self) -> str:
        """Return mode, stage, units, groups and parameters in one line."""
        return f"Ledger({self.title().removeprefix('zeroamp: ')})"

    def summary(self) -> str:
        """Return the title, and the bytes of each pair of all-gather and reduction dtype. `str` has all tables."""
        from zeroamp.reporting.ledger_tables import summary_text

        return summary_text(self)

    def per_parameter(self) -> str:
        """Return a table of one row per parameter: class, group, dtypes, bytes and the reason for the dtypes."""
        from zeroamp.reporting.ledger_tables import parameter_text

        return parameter_text(self)

    def group_rows(self) -> list[dict[str, Any]]:
        """Return one dict per group: name, kind, numbers of parameters and elements, the seven dtypes, and bytes.

        Bytes per step count all all-gathers and reductions of one optimizer step: see `dry_run/planned_traffic.py`.
        Bytes per rank need `num_shards`, and count the stored shard (padding included), the unsharded parameters, and
        the gradients (a shard; at stages 0 and 1 with accumulation, the unsharded sums too). If any parameter is
        sharded over another dimension than 0, each dict also has the sharded dimensions.
        """
        columns = ("kind", "params", "elements", *DTYPE_COLUMNS, *self._byte_columns)
        rows = self.rows()
        return [
            {
                "group": row["group"],
                **cells(row, rows.part_columns),
                **({SHARD_DIMS: ", ".join(map(str, row[SHARD_DIMS])) or "-"} if rows.has_other_dims else {}),
                **cells(row, columns),
            }
            for row in rows.groups
        ]

    def parameter_rows(self) -> list[dict[str, Any]]:
        """Return one dict per parameter: FQN, unit, group, class, elements, the seven dtypes, bytes and "why".

        If any parameter is sharded over another dimension than 0, each dict also has the sharded dimension.
        """
        rows = self.rows()
        dim = (SHARD_DIM,) if rows.has_other_dims else ()
        first = ("parameter", *rows.part_columns, "unit", "group", "class", "elements", *dim)
        columns = (*first, *DTYPE_COLUMNS, *self._byte_columns, "why")
        return [cells(row, columns) for row in rows.parameters]

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as values that JSON can hold. Later versions may add keys, but do not remove any.

        dtypes are short names, or None where a frozen parameter has none. Bytes are None if the ranks are not known.
        "config" gives an equal policy. "units" are the FQNs below the root. "summary" has the totals per pair of
        all-gather and reduction dtype, "classes" those per module class and dtypes. "groups" and "parameters" have one
        row each. "traffic" is what `zeroamp.traffic` counts in one optimizer step. "low_share" is the part of the
        trainable elements that is all-gathered in the mode's low precision.
        """
        rows = self.rows()
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

    def verify(
        self,
        model: nn.Module,
        batch: object,
        *,
        loss_fn: LossFunction | None = None,
        optimizer: Optimizers = None,
    ) -> Verification:
        """Run one optimizer step on `batch` without an update and compare every dtype that occurs with this ledger.

        Call it on all ranks. It runs as many forwards and backwards as the config accumulates, all on `batch`. It
        observes the dtypes of stored and unsharded parameters, of the ops that consume them, of raw gradients,
        collectives, sums and optimizer state. Parameters, gradients, buffers, random states and counters are restored,
        also if the step raises. Compiled modules run eagerly. Where a parameter's compute dtype is "per op", the dtypes
        of its ops are reported, but not compared. Modules that do not run are not checked. Under autocast, more
        forwards show whether the output changes if a weight's `dtype`, where the model reads it, is fp32.

        Args:
            model: the wrapped model of this ledger, between two optimizer steps.
            batch: a tensor, a tuple of arguments or a mapping of keyword arguments of the model's forward.
            loss_fn: computes a scalar loss from the model's output. Default: its `.loss`, or the output itself.
            optimizer: your optimizer, or several (`train.optimizers`). The dtypes of its state are compared. If a
                parameter has no state yet, a copy of the optimizer steps a copy of the shard. The optimizer itself is
                not changed. None: the column "optimizer" has what the ledger expects, and is not observed.

        Raises:
            PrecisionError: on all ranks, naming parameter, module, boundary, the expected and the observed dtype.
            StepError: there are gradients (between two micro-batches, for example), `batch` has another type, there is
                no scalar loss, or `optimizer` has no parameter of the model.
            WrapError: the model is not wrapped, the ledger is another model's, or the mesh has a tensor or expert axis.
        """
        return verify(self.plan, model, batch, loss_fn, optimizer)

    def rows(self) -> LedgerRows:
        """Return all rows of the tables, with None where a value is not known."""
        return ledger_rows(self.plan, self.ranks)

    @property
    def ranks(self) -> Ranks:
        """The numbers of ranks as one value."""
        return Ranks(
            num_shards=self.num_shards,
            num_replicas=self.num_replicas,
            num_tensor=self.num_tensor,
            num_expert=self.num_expert,
        )

    @property
    def _byte_columns(self) -> tuple[str, ...]:
        return PER_STEP if self.ranks.shards(self.plan.policy) is None else BYTES

    def title(self) -> str:
        """Return the sentence above the tables: mode, stage, units, groups and parameters."""
        policy, units = self.plan.policy, counted(len(self.plan.units), "FSDP unit")
        numel = sum(group.numel for group in self.plan.all_groups)
        low = f", {text}" if (text := self.plan.describe_low_share()) else ""
        return (
            f"zeroamp: mode {policy.mode}, ZeRO stage {policy.stage}, {units} below the root, "
            f"{counted(len(self.plan.all_groups), 'parameter group')}, {numel:,} parameters{low}"
        )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class _PartsLedger(Ledger):
    """The ledger of all parts of a pipeline. Rows of groups and parameters also name the part: see `explain`."""

    joined: LedgerRows

    def rows(self) -> LedgerRows:
        """Return the rows of all parts."""
        return self.joined


def explain(model: nn.Module) -> Ledger:
    """Return the dtype ledger of a model that `wrap_model` returned, or of all parts of a pipeline.

    Args:
        model: a wrapped model, or one part of a pipeline. For `PipelineStep.model`, all ranks must call `explain`, and
            each gets the ledger of the whole model. Rows of groups and parameters then name the part: "1" is the part
            of the ranks 1 of the axis "pp", and "1.0" the first one of several. Without this axis, the ledger has the
            parts of the first rank.

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
    if state.axes.is_joined:
        from zeroamp.pipelines.ledger import explain as explain_parts

        plan, ranks, joined = explain_parts(state)
        return _PartsLedger(plan=plan, joined=joined, **asdict(ranks))
    return Ledger(plan=state.plan, **asdict(ranks_of_axes(state.axes)))


def traffic(model: nn.Module) -> Traffic:
    """Return the counters of a wrapped model's collectives: `.by_dtype()`, `.calls`, `.num_bytes`, `.reset()`.

    Those of `PipelineStep.model` count the collectives of all parts of this rank since the `PipelineStep` was built.

    Raises:
        WrapError: the model is not wrapped.
    """
    return wrap_state(model).traffic
