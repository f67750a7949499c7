"""`Reproducible`: attaches the arithmetic, seeds and checks of `zeroamp.reproducible` to a run."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.accumulation.shard_accumulator import accumulate_shards
from zeroamp.hooks.collectives.traffic import STEP, Traffic, TrafficKey
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.mesh_axes import MeshAxes
from zeroamp.planning.plan import Plan
from zeroamp.policies.policy import Policy
from zeroamp.reproducible.arithmetic import ReproducibleArithmetic
from zeroamp.reproducible.checks import check_config, check_reproducible, refuse_dependence_on_shards
from zeroamp.reproducible.exact_sum import NUM_NUMBERS
from zeroamp.reproducible.seeds import MicroBatchRandomness, micro_batch_seed
from zeroamp.reproducible.tree_sums import TreeSum
from zeroamp.training.optimizer_step import ArithmeticExtension, Step
from zeroamp.training.step import StepExtension, TrainStep, step_of
from zeroamp.wrapping.extensions import WrapExtension
from zeroamp.wrapping.state import WrapState


class Reproducible(WrapExtension, ArithmeticExtension, StepExtension):
    """Gives a run the same bits on any number of ranks."""

    needs_train_step = "reproducible True"
    data_axes_only = "zeroamp.reproducible"

    def __init__(self) -> None:
        self._state: WrapState | None = None

    def check_config(self, policy: Policy) -> None:
        """Raise for keys with which the bits would depend on the number of ranks."""
        check_config(policy)

    def check_mesh(self, model: nn.Module, plan: Plan, axes: MeshAxes) -> None:
        """Raise for models and numbers of ranks with which the bits would depend on the number of ranks."""
        check_reproducible(model, plan, axes.fsdp)

    def attach(self, model: nn.Module, state: WrapState) -> None:
        """Sum micro-batches in the order of the tree, and leave all divisions to `TrainStep`."""
        self._state = state
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
        accumulate_shards(state, TreeSum)

    def attach_arithmetic(self, step: Step) -> None:
        """Replace the arithmetic of the steps."""
        if self._state is None:
            raise AssertionError("expected `attach` to be called before")
        step.arithmetic = ReproducibleArithmetic(self._state, step.gradients)

    def check_optimizer(self, optimizer: torch.optim.Optimizer, *, on_shards: bool) -> None:
        """Raise for an optimizer whose updates may depend on the shards."""
        refuse_dependence_on_shards(optimizer, on_shards=on_shards)

    def attach_step(self, train: TrainStep) -> None:
        """Seed the random numbers of each micro-batch."""
        arithmetic = step_of(train).arithmetic
        if self._state is None or not isinstance(arithmetic, ReproducibleArithmetic):
            raise AssertionError("expected the arithmetic of `attach_arithmetic`")
        arithmetic.randomness = MicroBatchRandomness(self._state, lambda: micro_batch_seed(train))

    def add_traffic(self, plan: Plan, ranks: Ranks, traffic: Traffic) -> None:
        """Add the numbers of the exact sums."""
        del plan, ranks
        num_more = 2 * (NUM_NUMBERS - 1)
        traffic.num_bytes[TrafficKey("all_reduce", torch.float64, STEP)] += num_more * torch.float64.itemsize
