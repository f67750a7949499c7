"""The dtype ledger: which dtype is used where, for every group and every parameter."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import nn

from zeroamp.hooks import Traffic
from zeroamp.plan import ParamDtypes, Plan
from zeroamp.policies.dtypes import short_name
from zeroamp.state import wrap_state

_DTYPE_COLUMNS = ("storage", "gather", "compute", "gradient", "wire", "accumulate", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What `explain` returns. `print` shows the groups; `per_parameter` is the long form."""

    plan: Plan

    def __str__(self) -> str:
        """Return one row per group; neighbours that differ in name only share one."""
        policy, units = self.plan.policy, self.plan.units
        num_modules = sum(len(self.plan.modules_of(unit)) for unit in units)
        merged = f" ({num_modules} modules)" if self.plan.merged else ""
        title = (
            f"zeroamp: mode {policy.mode}, ZeRO stage {policy.stage}, {len(units)} units{merged} below the root, "
            f"{len(self.plan.groups)} groups, {sum(group.numel for group in self.plan.groups):,} parameters"
        )
        return f"{title}\n{self._table(self.summary_rows())}\n\n{self._table(_fold(self.group_rows()))}"

    def per_parameter(self) -> str:
        """Return a table of one row per parameter, with the reason of its dtypes."""
        return self._table(self.parameter_rows())

    def summary_rows(self) -> list[dict[str, Any]]:
        """Return one dict per pair of gather and wire dtype: parameters, elements, and MB of one gather of them all."""
        return [
            {
                "gathered in": row["gather"],
                "reduced in": row["wire"],
                "params": row["params"],
                "elements": row["elements"],
                "MB per gather": round(row["bytes_per_gather"] / 1e6, 1),
            }
            for row in self._totals()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold: config, units, summary, groups, parameters. Its keys stay; new ones may come.

        dtypes are short names, and None where a frozen parameter has none. "config" is one that makes an equal policy;
        "units" the FQNs below the root; "summary" the totals per pair of gather and wire dtype.
        """
        return {
            "config": self.plan.policy.to_config(),
            "units": list(self.plan.units),
            "summary": self._totals(),
            "groups": [
                {
                    "group": group.name,
                    "kind": group.kind,
                    "unit": group.unit or "root",
                    "params": len(group.params),
                    "elements": group.numel,
                    **_dtype_names(group.dtypes),
                }
                for group in self.plan.groups
            ],
            "parameters": [
                {
                    "parameter": param.fqn,
                    "aliases": list(param.aliases),
                    "unit": param.unit or "root",
                    "group": group.name,
                    "shape": list(param.shape),
                    "elements": param.numel,
                    **_dtype_names(param.dtypes),
                    "why": param.reason,
                }
                for group in self.plan.groups
                for param in group.params
            ],
        }

    def _totals(self) -> list[dict[str, Any]]:
        params = self.plan.params
        names = [f"{short_name(p.group_key[1])} {short_name(p.group_key[2])}" for p in params]
        pairs, index = np.unique(names, return_inverse=True)
        elements = np.array([param.numel for param in params], dtype=np.int64)
        num_bytes = elements * np.array([param.group_key[1].itemsize for param in params], dtype=np.int64)
        rows = []
        for number, pair in enumerate(pairs):
            gather, wire = str(pair).split()
            chosen = index == number
            rows.append(
                {
                    "gather": gather,
                    "wire": wire,
                    "params": int(chosen.sum()),
                    "elements": int(elements[chosen].sum()),
                    "bytes_per_gather": int(num_bytes[chosen].sum()),
                }
            )
        return rows

    def group_rows(self) -> list[dict[str, Any]]:
        """Return one dict per group: name, kind, numbers of parameters and elements, and the seven dtypes.

        Where units are merged also the modules of each group's unit, which is named after the first of them.
        """
        return [
            {
                "group": group.name,
                **({"modules": self._modules(group.unit)} if self.plan.merged else {}),
                "kind": group.kind,
                "params": len(group.params),
                "elements": group.numel,
                **_dtype_cells(group.dtypes),
            }
            for group in self.plan.groups
        ]

    def parameter_rows(self) -> list[dict[str, Any]]:
        """Return one dict per parameter: FQN, unit, group, elements, the seven dtypes and why."""
        return [
            {
                "parameter": param.fqn,
                "unit": param.unit or "root",
                "group": group.name,
                "elements": param.numel,
                **_dtype_cells(param.dtypes),
                "why": param.reason,
            }
            for group in self.plan.groups
            for param in group.params
        ]

    def _modules(self, unit: str) -> str:
        return ", ".join(self.plan.modules_of(unit)) or "root"

    @staticmethod
    def _table(rows: list[dict[str, Any]]) -> str:
        return tabulate(rows, headers="keys", tablefmt="simple", intfmt=",")


def explain(model: nn.Module) -> Ledger:
    """Return the dtype ledger of a model that `wrap_model` returned.

    Raises:
        WrapError: the model is not wrapped.
    """
    return Ledger(plan=wrap_state(model).plan)


def traffic(model: nn.Module) -> Traffic:
    """Return the counters of a wrapped model's collectives: `.by_dtype()`, `.calls`, `.num_bytes`, `.reset()`.

    Raises:
        WrapError: the model is not wrapped.
    """
    return wrap_state(model).traffic


def _fold(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring rows that are equal but for the name: thirty decoder layers are one line."""
    folded: list[dict[str, Any]] = []
    for row in rows:
        last = folded[-1] if folded else None
        if last and all(last[key] == row[key] for key in row if key != "group"):
            last["last"], last["groups"] = row["group"], last["groups"] + 1
        else:
            folded.append({**row, "last": "", "groups": 1})
    return [
        {
            "group": f"{row['group']} … {last}" if (last := row.pop("last")) else row["group"],
            "groups": row.pop("groups"),
            **{key: value for key, value in row.items() if key != "group"},
        }
        for row in folded
    ]


def _dtype_cells(dtypes: ParamDtypes) -> dict[str, str]:
    return {column: name or "-" for column, name in _dtype_names(dtypes).items()}


def _dtype_names(dtypes: ParamDtypes) -> dict[str, str | None]:
    cells = {column: getattr(dtypes, column) for column in _DTYPE_COLUMNS}
    return {column: short_name(cell) if isinstance(cell, torch.dtype) else cell for column, cell in cells.items()}
