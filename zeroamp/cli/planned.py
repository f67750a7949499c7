"""Makes the plan and the ledger for the arguments of a command."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroamp.cli.axis_sizes import AxisSizes
from zeroamp.cli.model_source import load_inputs, load_model, takes_mesh
from zeroamp.hooks._torch.process_groups import fake_ranks
from zeroamp.ledger.explain import Ledger
from zeroamp.meshes.refused_meshes import refuse_combinations
from zeroamp.module_dtypes.extension import overridden
from zeroamp.planning.mesh import Ranks, current_device_type, mesh_shape
from zeroamp.planning.mesh_axes import find_axes, ranks_of_axes
from zeroamp.planning.plan import Plan, build_plan
from zeroamp.policies.errors import WrapError, some_of
from zeroamp.policies.policy import Policy
from zeroamp.reporting.tables import paragraph

TRACED_TOKENS = 2048
"""Sequence length of the inputs of a traced run: the default of `zeroamp plan`. The batch is 1."""


@contextmanager
def model_on_axes(source: str, sizes: AxisSizes) -> Iterator[tuple[nn.Module, DeviceMesh]]:
    """Return the model of a factory that takes a mesh, and the mesh, on ranks that do not exist.

    Raises:
        WrapError: `source` is not a factory with an argument `mesh`.
    """
    if not takes_mesh(source):
        raise WrapError(
            f"model {source!r} must be a factory with an argument mesh, because --mesh has a tensor or expert axis: "
            "return the model after parallelize_module over mesh. Else it is not known which parameters are "
            "distributed; leave the axis out, and a rank holds no less than it would beside the axis."
        )
    with fake_ranks(sizes.num_ranks):
        shape, names = tuple(sizes.by_name.values()), tuple(sizes.by_name)
        mesh = init_device_mesh(current_device_type(), shape, mesh_dim_names=names)
        yield load_model(source, mesh), mesh


def ledger_on_axes(
    source: str, policy: Policy, auto_wrap: list[str] | None, inputs: str | None, sizes: AxisSizes
) -> Ledger:
    """Return the ledger of a model that is distributed over a tensor or expert axis.

    Raises:
        WrapError: the model, the axes and the policy do not go together.
    """
    with redirect_stdout(sys.stderr), model_on_axes(source, sizes) as (model, mesh):  # a factory may print
        axes = find_axes(model, mesh)
        if axes is None:
            raise AssertionError("expected the axes of a mesh")
        plan = build_plan(model, policy, auto_wrap, _example_inputs(inputs))
        refuse_combinations(model, plan, axes, materialize=False)
        return Ledger(plan=plan, **asdict(ranks_of_axes(axes)))


def _example_inputs(inputs: str | None) -> Any:
    if inputs is None:
        return None
    make = load_inputs(inputs)
    with torch.device("meta"):
        return make(1, TRACED_TOKENS)


def plan_of(source: str, policy: Policy, auto_wrap: list[str] | None, inputs: str | None) -> Plan:
    """Return the plan of the model that `--model` names."""
    with redirect_stdout(sys.stderr):  # a factory may print, and stdout may be parsed
        return build_plan(load_model(source), policy, auto_wrap, _example_inputs(inputs))


def ledger_of(plan: Plan, world_size: int | None, sizes: AxisSizes | None = None) -> Ledger:
    """Return the ledger of a plan for a number of ranks or for the axes of a mesh. Without both it has no bytes."""
    if sizes is not None:
        if sizes.distributes_parameters:  # of a factory that does not take the mesh
            return Ledger(plan=plan)
        if plan.policy.stage == 0:
            return Ledger(plan=plan, num_shards=1, num_replicas=sizes.replicate * sizes.num_shards)
        replicas = sizes.replicate if sizes.replicate > 1 else None
        return Ledger(plan=plan, num_shards=sizes.num_shards, num_replicas=replicas)
    if world_size is None:
        return Ledger(plan=plan)
    ranks = _ranks(plan.policy, world_size)
    return Ledger(plan=plan, num_shards=ranks.num_shards, num_replicas=ranks.num_replicas)


def describe_plan(model: str, plan: Plan) -> str:
    """Return lines about units and groups, and what each override applies to."""
    low = plan.describe_low_share()
    head = f"{model}: {len(plan.units)} units below the root, {len(plan.groups)} groups{f', {low}' if low else ''}"
    lines = [head, *_override_lines(plan)]
    return paragraph("\n".join(lines))


def _override_lines(plan: Plan) -> Iterator[str]:
    """Yield what each override sets, and for which parameters of the model."""
    for index, asked in enumerate(plan.policy.overrides):
        params = overridden(plan, index)
        names = f": {some_of([param.fqn for param in params], 4)}" if params else ""
        count = f"{len(params)} parameter{'' if len(params) == 1 else 's'}"
        yield f"zeroamp.overrides.{index}: {asked.settings()} for {count}{names}"


def _ranks(policy: Policy, world_size: int) -> Ranks:
    *replicas, num_shards = mesh_shape(policy.stage, world_size, policy.dp_replicate_size)
    return Ranks(num_shards=num_shards, num_replicas=replicas[0] if replicas else None)
