"""Numbers the micro-batches of all ranks in an optimizer step, in the order in which their gradients are added.

[Note: One order of micro-batches]
An optimizer step has G = N k micro-batches: k on each of N ranks. With `zeroamp.reproducible` they have one order, and
gradients are added as a balanced binary tree over that order (`hooks/collectives/tree_sum.py`). The gradients of the
ranks are added first, then the micro-batches. So the index of micro-batch j on rank r is j N + r, and N must be a power
of two: each reduction then adds a subtree.
"""

from zeroamp.planning.mesh import shard_size
from zeroamp.training.step import TrainStep, step_of
from zeroamp.wrapping.state import wrap_state


def micro_batch_index(train: TrainStep) -> int:
    """Return the index of this rank's next micro-batch among those of all ranks in the optimizer step, from 0.

    After the last micro-batch, until `step` has ended the optimizer step, this is the last micro-batch's index.
    """
    step = step_of(train)
    number = 0 if step.is_between_steps else step.current.num_micro_batches - step.is_complete
    indices = micro_batch_indices(train)
    return indices.start + number * indices.step


def micro_batch_indices(train: TrainStep) -> range:
    """Return the indices of this rank's micro-batches of an optimizer step among those of all ranks, in their order.

    A loop whose micro-batch depends only on the step and this index trains on the same data on any number of ranks.
    `zeroamp.MicroBatchSampler` assigns samples in this way. docs/reproducible.md has the order.
    """
    state = wrap_state(train.model)
    mesh, per_rank = state.mesh, state.plan.policy.gradient_accumulation_steps
    replica = mesh.get_local_rank(0) if mesh.ndim == 2 else 0
    rank = replica * shard_size(mesh) + mesh.get_local_rank(mesh.ndim - 1)
    return range(rank, mesh.size() * per_rank, mesh.size())
