"""Numbers the micro-batches of all ranks in an optimizer step, in the order in which their gradients are added.

[Note: One order of micro-batches]
An optimizer step has G = N k micro-batches: k on each of N ranks. With `zeroamp.reproducible` they have one order, and
gradients are added as a balanced binary tree over that order (`hooks/collectives/tree_sum.py`). So each rank, and each
collective, must add a subtree. The index of a micro-batch therefore depends on what is added first:

| stages | added first | index of micro-batch j on rank r |
|---|---|---|
| 0 and 1 | the micro-batches of a rank | r k + j |
| 2 and 3 | the ranks that shard (S of them), then the micro-batches, then the replicas | (replica k + j) S + place |

`place` is the rank's place among the ranks that shard. Without replicas, stages 2 and 3 have the index j N + r. The
number of terms that are added first must be a power of two, so that they are a subtree.
"""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from zeroamp.planning.mesh import replicate_size, shard_size
from zeroamp.policies.policy import Policy
from zeroamp.training.step import TrainStep, driver_of
from zeroamp.wrapping.state import wrap_state


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchOrder:
    """The place of one rank's micro-batches among those of all ranks: see [Note: One order of micro-batches]."""

    num_ranks: int
    """The number of ranks of the mesh."""
    rank: int
    """This rank's number in the mesh, from 0."""
    num_shards: int
    """The number of ranks whose gradients are added before those of other micro-batches: 1 at stages 0 and 1."""

    @property
    def depends_on_count(self) -> bool:
        """Whether indices depend on the number of micro-batches per rank. That number must then be a power of two.

        It is so if the micro-batches of a rank, or of a replica, are summed before other ranks' gradients are added.
        """
        return self.num_ranks > self.num_shards

    def index(self, number: int, per_rank: int) -> int:
        """Return the index, from 0 to `num_ranks * per_rank - 1`, of this rank's micro-batch `number` of `per_rank`."""
        replica, place = divmod(self.rank, self.num_shards)
        return (replica * per_rank + number) * self.num_shards + place

    def indices(self, per_rank: int) -> range:
        """Return the indices of this rank's micro-batches of an optimizer step, in the order in which they run."""
        return range(self.index(0, per_rank), self.index(per_rank, per_rank), self.num_shards)


def micro_batch_order(policy: Policy, mesh: DeviceMesh) -> MicroBatchOrder:
    """Return the order for this rank of a mesh that `mesh_for_stage` returned."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise AssertionError("expected this rank to be part of the mesh")
    num_shards = shard_size(mesh)
    replica, place = coordinate[0] if mesh.ndim == 2 else 0, coordinate[-1]
    return MicroBatchOrder(
        num_ranks=replicate_size(mesh) * num_shards,
        rank=replica * num_shards + place,
        num_shards=num_shards if policy.stage >= 2 else 1,
    )


def micro_batch_index(train: TrainStep) -> int:
    """Return the index of this rank's next micro-batch among those of all ranks in the optimizer step, from 0.

    After the last micro-batch, until `step` has ended the optimizer step, this is the last micro-batch's index.
    """
    driver = driver_of(train)
    number = 0 if driver.is_between_steps else driver.state.step.num_micro_batches - driver.is_reduced
    policy, order = _order_of(train)
    return order.index(number, policy.gradient_accumulation_steps)


def micro_batch_indices(train: TrainStep) -> range:
    """Return the indices of this rank's micro-batches of an optimizer step among those of all ranks, in their order.

    A loop whose micro-batch depends only on the step and this index trains on the same data on any number of ranks.
    `zeroamp.MicroBatchSampler` assigns samples in this way. docs/reproducible.md has the order.
    """
    policy, order = _order_of(train)
    return order.indices(policy.gradient_accumulation_steps)


def _order_of(train: TrainStep) -> tuple[Policy, MicroBatchOrder]:
    state = wrap_state(train.model)
    return state.plan.policy, micro_batch_order(state.plan.policy, state.mesh)
