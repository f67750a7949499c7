"""What every rank runs in the tests of pipelines: parts of a decoder, in one of torch's schedules."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

import zeroamp
from tests.models import pipelines as models
from tests.processes.parallel_training import data_rank, mesh_of, num_data
from tests.processes.training import full_parameters

OF_A_V = ("ZBVZeroBubble", "DualPipeV")
MICRO_BATCH = 2


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """What one rank saw."""

    losses: list[list[float]]
    """[step][micro-batch]. Empty without the last stage."""
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    """Whole, of this rank's parts, at the end."""
    calls: dict[tuple[int, str, str, str], int]
    """(part, collective, dtype, group) -> calls in the last step."""


def num_parts(schedule, num_stages=2):
    return num_stages * (2 if issubclass(get_schedule_class(schedule), PipelineScheduleMulti) else 1)


def num_micro_batches(schedule):
    return 8 if schedule == "DualPipeV" else 4


def parts_of_rank(schedule, rank, num_stages):
    number = num_parts(schedule, num_stages)
    if schedule in OF_A_V:
        return [rank, number - 1 - rank]
    return list(range(rank, number, num_stages))


def _wrapped(part, cfg, data):
    policy = zeroamp.policy_from_config(cfg, world_size=num_data(data))
    return zeroamp.wrap_model(part, policy, data, auto_wrap_policy={"Block"})


def start(schedule, cfg, axes, *, tied=False, edit=lambda parts, mesh: None, wrap=_wrapped, slices=None, loss_fn=None):
    """Return the mesh, this rank's parts by their numbers, and the schedule. `loss_fn` gets the wrapped parts."""
    mesh = mesh_of(**axes)
    data = mesh[tuple(name for name in axes if name != "pp")] if slices is None else slices(mesh)
    number, stages = num_parts(schedule, axes["pp"]), mesh["pp"]
    parts = {i: models.part(i, number, tied=tied) for i in parts_of_rank(schedule, stages.get_local_rank(), axes["pp"])}
    edit(parts, mesh)
    for index, part in parts.items():
        parts[index] = wrap(part, cfg, data)
    found = [PipelineStage(p, i, number, torch.device("cpu"), group=stages.get_group()) for i, p in parts.items()]
    cls = get_schedule_class(schedule)
    of_rank = found if issubclass(cls, PipelineScheduleMulti) else found[0]
    found_loss = models.loss_of if loss_fn is None else loss_fn(parts)
    return mesh, parts, cls(of_rank, num_micro_batches(schedule), loss_fn=found_loss)


def run_step(schedule, name, parts, mesh, step):
    """Run the forwards and backwards of one optimizer step; return the losses of this rank's micro-batches."""
    number, losses = num_parts(name, mesh["pp"].size()), []
    inputs, target = models.samples(step, data_rank(mesh), MICRO_BATCH * num_micro_batches(name))
    last = {"target": target, "losses": losses} if number - 1 in parts else {}
    schedule.step(*([inputs] if 0 in parts else []), **last)
    return [loss.item() for loss in losses]


def fully_sharded(part, cfg, data):
    """Plain FSDP2 in bf16, summed and reduced in fp32, with the stage of the config."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reshards = cfg["zero_optimization"]["stage"] == 3
    for module in (*part.blocks.values(), part):
        fully_shard(module, mesh=data, mp_policy=policy, reshard_after_forward=reshards)
    return part


def gradients(name, cfg, wrap=_wrapped):
    """The whole gradients of this rank's parts in one step; None for a parameter without one."""
    mesh, parts, schedule = start(name, cfg, {"pp": 2, "dp": 2}, wrap=wrap)
    run_step(schedule, name, parts, mesh, 0)
    named = {fqn: each.grad for part in parts.values() for fqn, each in part.named_parameters()}
    return {fqn: each if each is None else each.full_tensor() for fqn, each in named.items()}


def train(name, cfg, axes, num_steps, *, max_norm, lr, tied=False, **options):
    mesh, parts, schedule = start(name, cfg, axes, tied=tied, **options)
    optimizers = [torch.optim.SGD(part.parameters(), lr=lr) for part in parts.values()]
    losses, norms, last = [], [], num_parts(name, axes["pp"]) - 1
    for step in range(num_steps):
        before = _calls(parts)
        losses.append(run_step(schedule, name, parts, mesh, step))
        if tied and {0, last} <= parts.keys():
            zeroamp.sum_tied_gradients(parts[0].embed.weight, parts[last].head.weight)
        elif tied and (weight := tied_weight(parts, last)) is not None:
            peer = axes["pp"] - 1 if 0 in parts else 0
            zeroamp.sum_tied_gradients(weight, peer, mesh["pp"].get_group())
        norms.append(zeroamp.clip_grad_norm_(parts.values(), max_norm))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    parameters = {fqn: each for part in parts.values() for fqn, each in full_parameters(part).items()}
    calls = {key: number - before.get(key, 0) for key, number in _calls(parts).items()}
    return RankRun(losses=losses, norms=[norm.item() for norm in norms], parameters=parameters, calls=calls)


class ReportOfStep(NamedTuple):
    loss: float
    norm: float
    scale: float
    skipped: bool


def train_by_steps(name, cfg, axes, num_steps, *, lr, optimizer=torch.optim.SGD):
    """As `train`, with `PipelineStep`. Return the reports too."""
    made, losses, reports = [], [], []

    def loss_fn(parts):
        parameters = [parameter for part in parts.values() for parameter in part.parameters()]
        made.append(zeroamp.PipelineStep(list(parts.values()), optimizer(parameters, lr=lr)))
        return made[0].wrap_loss(models.loss_of)

    mesh, parts, schedule = start(name, cfg, axes, loss_fn=loss_fn)
    (by_steps,) = made
    for step in range(num_steps):
        losses.append(run_step(schedule, name, parts, mesh, step))
        report = by_steps.step()
        reports.append(ReportOfStep(report.loss, report.grad_norm, report.loss_scale, report.skipped))
    parameters = {fqn: each for part in parts.values() for fqn, each in full_parameters(part).items()}
    norms = [report.norm for report in reports]
    return RankRun(losses=losses, norms=norms, parameters=parameters, calls={}), reports


def _calls(parts):
    return {
        (index, key.collective, str(key.dtype), key.group): number
        for index, part in parts.items()
        for key, number in zeroamp.traffic(part).calls.items()
    }


def tied_weight(parts, last):
    if 0 in parts:
        return parts[0].embed.weight
    return parts[last].head.weight if last in parts else None
