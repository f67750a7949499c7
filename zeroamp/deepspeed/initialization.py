"""`initialize`: makes an engine of a model, with its optimizer, data loader and scheduler."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zeroamp.deepspeed.arguments import ConfigLike, config_of
from zeroamp.deepspeed.comm import init_distributed
from zeroamp.deepspeed.engine import DeepSpeedEngine
from zeroamp.deepspeed.optimizer import ZeroOptimizer
from zeroamp.deepspeed.refused import refusal
from zeroamp.deepspeed.utils import leaf_names
from zeroamp.deepspeed.zero import REPLACED, mark_sharded
from zeroamp.optimizers.from_config import optimizer_from_config
from zeroamp.optimizers.parameters_before import ParametersBefore
from zeroamp.optimizers.schedulers import scheduler_from_config
from zeroamp.policies.errors import StepError
from zeroamp.policies.policy import Policy, policy_from_config
from zeroamp.training.refused_arguments import Scheduler
from zeroamp.training.step import TrainStep
from zeroamp.wrapping.state import wrap_state
from zeroamp.wrapping.wrap import wrap_model

OptimizerLike = torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer] | None
SchedulerLike = Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None
Initialized = tuple[DeepSpeedEngine, ZeroOptimizer | None, Any, Scheduler | None]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: SchedulerLike = None,
    distributed_port: int = 29500,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: ConfigLike | None = None,
    mesh_param: object = None,
    config_params: ConfigLike | None = None,
) -> Initialized:
    """Shard a model over all ranks by the config, and return an engine that trains it. All ranks call it.

    The model is wrapped in place, by `zeroamp.wrap_model`. Keys that the config does not have get DeepSpeed's defaults
    if they change an update: gradients are clipped to norm 1, bf16 steps with non-finite gradients are skipped, and
    all ranks get the first rank's weights.

    Args:
        args: its `deepspeed_config` is the config, unless `config` is given.
        model: a plain nn.Module on any device, the meta device included.
        optimizer: one built from the model's parameters, or a function of the parameters that returns one. None: the
            config's `optimizer` block; without it the engine cannot train.
        model_parameters: the parameters or param groups of the config's optimizer, or the argument of the function.
            None: all parameters of the model.
        training_data: a dataset, for the returned data loader. torch's `DistributedSampler` selects each rank's part,
            in the same order in every epoch unless `loader.sampler.set_epoch(epoch)` is called.
        lr_scheduler: a scheduler of `optimizer`, or a function of the optimizer that returns one. None: the config's
            `scheduler` block, if there is one. The engine steps it after each update.
        distributed_port: MASTER_PORT, if the environment has none.
        mpu: refused.
        dist_init_required: False: the process group must exist already.
        collate_fn: of the data loader.
        config: a mapping, or the path of a JSON file.
        mesh_param: refused.
        config_params: the old name of `config`.

    Returns:
        The engine, its optimizer (or None), a data loader (or None) and the scheduler (or None).

    Raises:
        UnsupportedError: an argument is refused.
        ConfigError: no config or two are given, or `policy_from_config`, `optimizer_from_config` or
            `scheduler_from_config` refuses it.
        StepError: `TrainStep` refuses the optimizer or the scheduler, or there is a scheduler without an optimizer.
        WrapError: `wrap_model` refuses the model.
    """
    if mpu is not None or mesh_param is not None:
        raise refusal("initialize(mpu=, mesh_param=)", "Leave them out: parameters are sharded over all ranks.")
    if not isinstance(model, nn.Module):
        raise refusal(f"initialize(model={type(model).__name__})", "Pass model=, a torch.nn.Module.")
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    given = config_of(args, config, config_params)
    policy = _policy(given, model)
    before = ParametersBefore(model)
    chosen = _listed(model.parameters() if model_parameters is None else model_parameters)
    if lr_scheduler is not None and optimizer is None and policy.optimizer is None:
        raise StepError(
            "initialize(lr_scheduler=) was given without an optimizer. Pass optimizer=, or write it in the config."
        )
    wrap_model(model, policy)
    wrap_state(model).step.trained_by = "an engine trains. Call engine.backward(loss), then engine.step()"
    before.wrapped(model)
    for parameter in before.replaced():
        vars(parameter)[REPLACED] = True
    inside = _optimizer(optimizer, policy, _sharded(before, chosen), before)
    scheduler = None if inside is None else _scheduler(lr_scheduler, policy, inside)
    mark_sharded(model)
    train_step = None if inside is None else TrainStep(model, inside, scheduler)
    engine = DeepSpeedEngine(model, policy, train_step)
    if training_data is not None:
        engine.training_dataloader = _loader(training_data, engine.train_micro_batch_size_per_gpu(), collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, scheduler


def _policy(config: dict[str, Any], model: nn.Module) -> Policy:
    policy = policy_from_config(config, world_size=dist.get_world_size())
    leaves = leaf_names(model)
    if not leaves:
        return policy
    key = "zero_optimization.leaf_module.names"
    return policy.replace(**{key: sorted({*policy.leaf_modules.names, *leaves})})


def _listed(parameters: Any) -> list[Any]:
    """Return parameters or param groups as a list: an iterator is invalid after the wrap. Groups are copied."""
    listed = [parameters] if isinstance(parameters, torch.Tensor | dict) else list(parameters)
    return [
        {**each, "params": _listed(each["params"])}
        if isinstance(each, dict)
        # Helpers of transformers and others return pairs of name and parameter.
        else (each[1] if isinstance(each, tuple) else each)
        for each in listed
    ]


def _sharded(before: ParametersBefore, parameters: Iterable[Any]) -> list[Any]:
    """Replace the parameters in a list of parameters or param groups by the sharded ones."""
    return [
        {**each, "params": _sharded(before, each["params"])} if isinstance(each, dict) else before.sharded(each)
        for each in parameters
    ]


def _optimizer(
    given: OptimizerLike, policy: Policy, parameters: list[Any], before: ParametersBefore
) -> torch.optim.Optimizer | None:
    if given is None:
        return None if policy.optimizer is None else optimizer_from_config(policy, parameters)
    if isinstance(given, torch.optim.Optimizer):
        before.repoint([given])
        return given
    return given(parameters)


def _scheduler(given: SchedulerLike, policy: Policy, optimizer: torch.optim.Optimizer) -> Scheduler | None:
    if given is None:
        return None if policy.scheduler is None else scheduler_from_config(policy, optimizer)
    # `step` tells a scheduler from a function of the optimizer. A scheduler may be callable too.
    if hasattr(given, "step") and not isinstance(given, type):
        return cast(Scheduler, given)
    return cast(Callable[[torch.optim.Optimizer], Scheduler], given)(optimizer)


def _loader(dataset: Any, batch_size: int, collate_fn: Callable[..., Any] | None) -> DataLoader[Any]:
    """Return a loader of this rank's part of a dataset. An iterable dataset must select its part itself."""
    sampler: Any = None if isinstance(dataset, IterableDataset) else DistributedSampler(dataset)
    has_device = torch.accelerator.is_available()
    loader = DataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate_fn, pin_memory=has_device)
    vars(loader)["data_sampler"] = loader.sampler  # DeepSpeed's name
    return loader
