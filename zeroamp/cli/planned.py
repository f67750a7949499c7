"""Makes the models, plans and ledgers for the arguments of a command."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroamp.cli.model_source import load_function, load_model, takes_mesh
from zeroamp.hooks._torch.fake_ranks import fake_ranks
from zeroamp.ledger.explain import Ledger
from zeroamp.meshes.refused_meshes import refuse_combinations
from zeroamp.planning.mesh import current_device_type, mesh_shape
from zeroamp.planning.mesh_axes import ROLES, find_axes, ranks_of_axes
from zeroamp.planning.plan import Plan, build_plan
from zeroamp.policies.errors import ConfigError, WrapError
from zeroamp.policies.policy import Policy

TRACED_TOKENS = 2048
"""Sequence length of the inputs of a traced run: the default of `zeroamp plan`. The batch is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSizes:
    """The sizes of the axes of a mesh that is not made yet."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    by_name: dict[str, int]
    """The sizes in the order of a mesh: the ranks of the last axes are in one node."""

    @property
    def distributes_parameters(self) -> bool:
        """Whether there is a tensor or expert axis of several ranks."""
        return self.tensor > 1 or self.expert > 1

    @property
    def num_data(self) -> int:
        """The number of ranks that get different samples. Batch sizes are multiplied by it."""
        return self.replicate * self.shard * self.expert

    @property
    def num_ranks(self) -> int:
        """The number of all ranks."""
        return self.num_data * self.context * self.tensor

    @property
    def num_shards(self) -> int:
        """The number of ranks over which FSDP2 shards parameters that are not experts."""
        return self.shard * self.context * self.expert


def axis_sizes(text: str | None, world_size: int | None) -> AxisSizes | None:
    """Parse a text such as "dp=8,tp=4,cp=2" into sizes of axes; None without `--mesh`. Names are those of `ROLES`.

    Raises:
        ConfigError: a name is unknown, two names have the same role, or a size is not a whole number from 1 on.
    """
    if text is None:
        return None
    sizes: dict[str, int] = {}
    names: dict[str, str] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        role = ROLES.get(name)
        if role in (None, "pipeline") or role in sizes or not size.isdecimal() or int(size) < 1:
            valid = ", ".join(name for name, role in ROLES.items() if role != "pipeline")
            raise ConfigError(
                f"--mesh must be NAME=SIZE parts, such as dp=8,tp=4,cp=2, but has the part {part!r}. Names: {valid}. "
                "Each kind of axis may occur once. Correct that part."
            )
        sizes[str(role)], names[str(role)] = int(size), name
    order = ("replicate", "shard", "context", "expert", "tensor")
    found = AxisSizes(**sizes, by_name={names[role]: sizes[role] for role in order if role in sizes})
    if world_size not in (None, found.num_ranks):
        raise typer.BadParameter(
            f"{text} has {found.num_ranks} ranks, but --world-size is {world_size}. Leave out --world-size.",
            param_hint="--mesh",
        )
    return found


@contextmanager
def model_on_axes(source: str, sizes: AxisSizes) -> Iterator[tuple[nn.Module, DeviceMesh]]:
    """Return the model of a factory that takes a mesh, and the mesh, on ranks that do not exist.

    Raises:
        WrapError: `source` is not a factory with an argument `mesh`.
    """
    if not takes_mesh(source):
        raise WrapError(
            f"--model {source} must be a factory with an argument mesh, because --mesh has a tensor or expert axis: "
            "return the model after parallelize_module over mesh. Or leave the axis out: a rank then holds no less."
        )
    with fake_ranks(sizes.num_ranks), redirect_stdout(sys.stderr):
        mesh = init_device_mesh(
            current_device_type(), tuple(sizes.by_name.values()), mesh_dim_names=tuple(sizes.by_name)
        )
        yield load_model(source, mesh), mesh


def plan_of(source: str, policy: Policy, auto_wrap: list[str] | None, inputs: str | None) -> Plan:
    """Return the plan of the model that `--model` names."""
    with redirect_stdout(sys.stderr):  # a factory may print, and stdout may be parsed
        return build_plan(load_model(source), policy, auto_wrap, _example_inputs(inputs))


def ledger_of(
    source: str,
    policy: Policy,
    auto_wrap: list[str] | None,
    inputs: str | None,
    *,
    world_size: int | None,
    sizes: AxisSizes | None,
) -> Ledger:
    """Return the ledger of a model, for a number of ranks or for the axes of a mesh. Without both it has no bytes.

    Raises:
        WrapError: the model, the axes and the policy do not go together.
    """
    if sizes is not None and sizes.distributes_parameters and takes_mesh(source):
        with model_on_axes(source, sizes) as (model, mesh):
            axes = find_axes(model, mesh)
            if axes is None:
                raise AssertionError("expected the axes of a mesh")
            plan = build_plan(model, policy, auto_wrap, _example_inputs(inputs))
            refuse_combinations(model, plan, axes, materialize=False)
            return Ledger(plan=plan, **asdict(ranks_of_axes(axes)))
    plan = plan_of(source, policy, auto_wrap, inputs)
    if (sizes is None and world_size is None) or (sizes is not None and sizes.distributes_parameters):
        return Ledger(plan=plan)
    num_ranks = sizes.num_ranks if sizes is not None else world_size or 1
    num_replicas = policy.dp_replicate_size if sizes is None else sizes.replicate
    *replicas, num_shards = mesh_shape(policy.stage, num_ranks, num_replicas)
    return Ledger(plan=plan, num_shards=num_shards, num_replicas=replicas[0] if replicas else None)


def _example_inputs(inputs: str | None) -> Any:
    if inputs is None:
        return None
    make = load_function(inputs, "--inputs")
    with torch.device("meta"):
        return make(1, TRACED_TOKENS)
