"""Checks for `zeroamp.reproducible` when a model is wrapped."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.planning.mesh import replicate_size, shard_size
from zeroamp.planning.micro_batch_order import micro_batch_order
from zeroamp.planning.plan import Plan
from zeroamp.policies.errors import ConfigError, WrapError

_WHY = "With zeroamp.reproducible, gradients are added as a binary tree over all micro-batches"


def check_reproducible(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Raise if the bits of a run would depend on the number of ranks.

    Raises:
        ConfigError: a number of ranks or micro-batches is not a power of two.
        WrapError: the model computes statistics over a micro-batch of each rank, or trains parameters that zeroamp
            does not reduce.
    """
    per_rank = plan.policy.gradient_accumulation_steps
    for number, what in ((shard_size(mesh), "ranks that shard"), (replicate_size(mesh), "replicas")):
        if not _is_power_of_two(number):
            raise ConfigError(
                f"{_WHY}. The number of {what} must be a power of two, but is {number}. Change the number."
            )
    order = micro_batch_order(plan.policy, mesh)
    if order.depends_on_count and not _is_power_of_two(per_rank):
        raise ConfigError(
            "gradient_accumulation_steps must be a power of two at stages 0 and 1 and with replicas, but is "
            f"{per_rank}. {_WHY}. Change the number, or use stage 2 or 3 without replicas."
        )
    for fqn, module in model.named_modules():
        tracks = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or tracks:
            raise WrapError(
                f"{fqn or 'The model'} is a {type(module).__name__}, whose statistics depend on the "
                "micro-batches that a rank sees. With zeroamp.reproducible, use nn.GroupNorm or nn.LayerNorm instead."
            )
    for fqn, parameter in model.named_parameters():
        if fqn in plan.ignored_fqns and parameter.requires_grad:
            raise WrapError(
                f"{fqn} is in ignored_params and is trained. zeroamp does not reduce its gradient, which therefore "
                "depends on the number of ranks. With zeroamp.reproducible, freeze it or remove it from ignored_params."
            )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
