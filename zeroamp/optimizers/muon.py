"""`torch.optim.Muon` on shards: one rank orthogonalizes each matrix, everything else is element-wise.

[Note: One owner per matrix]
    every rank    momentum and update of its shards, in fp32, rounded to bf16
    all-to-all    the shards of a matrix go to its owner, in bf16
    owner         Newton-Schulz of the whole matrix, in bf16
    all-to-all    the parts of the result go to the ranks that hold the shards, in bf16
    every rank    weight decay and update of its shards, in fp32

The bits are those of `torch.optim.Muon` in one process: Newton-Schulz rounds its input to bf16 before anything else,
and all other operations are element-wise. Each matrix is gathered once. DTensors would gather it for every product.

The result is scattered, not broadcast, because a rank needs only the part that it holds. Per optimizer step a rank
sends 2 bytes per element of its shards, and 2 bytes per element of the matrices it owns (for each replica). An fp32
all-gather of all gradients would send 4 bytes per element of all matrices. With replicas (stage 0, HSDP), the owners
are spread over the replicas too. Each replica gathers only the matrices it owns, and all ranks receive the results.

A rank holds the bf16 shards it sends, the bf16 matrices it owns, and the bf16 parts it receives, until the update ends.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import STEP, CollectiveListener, IssuedCollective
from zeroamp.planning.mesh import device_of, local_part, shard_size
from zeroamp.policies.errors import StepError
from zeroamp.wrapping.state import WrapState

Place = tuple[int, int]
"""A rank's place in the mesh: the index of its replica, and its index among the ranks that shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Matrix:
    shape: tuple[int, int]
    dim: int
    """The sharded dimension."""
    owner: Place

    def part(self, index: int, num_shards: int) -> tuple[int, int]:
        """Return start and length of a shard in the sharded dimension. FSDP2's chunks have ceil(length / ranks)."""
        length = self.shape[self.dim]
        size = -(-length // num_shards)
        start = min(index * size, length)
        return start, min(size, length - start)

    def numel_of_part(self, index: int, num_shards: int) -> int:
        return self.part(index, num_shards)[1] * self.shape[1 - self.dim]


@contextmanager
def updating_matrices(state: WrapState, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Update the shards of a wrapped model when `optimizer.step()`, a `torch.optim.Muon`'s, is called in the context.

    The update is the last hook before the step. Muon skips parameters without a gradient: the step finds none, and the
    context sets them again.
    """
    update = ShardedMuon(state)
    gradients: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def before(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            update(group, optimizer.state)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradients[parameter], parameter.grad = parameter.grad, None

    handle = optimizer.register_step_pre_hook(before)
    try:
        _refuse_others(optimizer)
        yield
    finally:
        handle.remove()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


class ShardedMuon:
    """Updates the matrices of one optimizer step, one param group after the other: see [Note: One owner per matrix]."""

    def __init__(self, state: WrapState) -> None:
        """Take the mesh, the process group of all its ranks, and the listeners to their collectives."""
        self._mesh: DeviceMesh = state.mesh
        self._group = state.world
        self._listeners: Sequence[CollectiveListener] = state.listeners
        self._device = device_of(state.mesh)
        self._num_shards = shard_size(state.mesh)
        table = state.mesh.mesh.view(-1, self._num_shards)  # replicas x shards
        group = dist.group.WORLD if state.world is None else state.world
        if group is None:
            raise AssertionError("expected a process group, as wrap_model initialises one")
        ranks = {
            dist.get_group_rank(group, int(table[replica, index])): (replica, index)
            for replica in range(table.shape[0])
            for index in range(self._num_shards)
        }
        self._places: list[Place] = [ranks[rank] for rank in sorted(ranks)]
        """In the order of the process group's ranks."""
        self._own: Place = ranks[dist.get_rank(group)]
        self._work = dict.fromkeys(self._places, 0)
        """Place -> multiplications of the matrices that it owns, over all param groups of this optimizer step."""

    def __call__(self, group: dict[str, Any], state: Mapping[Any, dict[str, Any]]) -> None:
        """Update the matrices of a param group that have gradients. `state` is that of the optimizer."""
        lr, momentum = group["lr"], group["momentum"]
        if isinstance(lr, torch.Tensor):
            lr = lr.squeeze()
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        low = []  # bf16, this rank's shards of the updates
        for parameter in params:
            of_parameter = state[parameter]
            if "momentum_buffer" not in of_parameter:
                of_parameter["momentum_buffer"] = torch.zeros_like(parameter.grad)
            own_grad, own_buffer = local_part(parameter.grad), local_part(of_parameter["momentum_buffer"])
            own_buffer.lerp_(own_grad, 1 - momentum)
            update = own_grad.lerp(own_buffer, momentum) if group["nesterov"] else own_buffer
            low.append(update.to(self._device, torch.bfloat16, copy=True))
        settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
        results = self._orthogonalized(params, low, lambda each: orthogonalized(each, *settings))
        for parameter, result in zip(params, results, strict=True):
            shard = local_part(parameter)
            shard.mul_(1 - lr * group["weight_decay"])
            shard.add_(result.to(shard.device), alpha=-lr * _lr_factor(group["adjust_lr_fn"], parameter.shape))
        torch.autograd.graph.increment_version(params)

    def _orthogonalized(self, params: list[torch.Tensor], low: list[torch.Tensor], function: Any) -> list[torch.Tensor]:
        """Return this rank's parts of the orthogonalized matrices, bf16.

        A matrix that is not a DTensor is one of `ignored_params`: every rank orthogonalizes its own copy.
        """
        results = list(low)
        sharded = [index for index, parameter in enumerate(params) if isinstance(parameter, DTensor)]
        for index in set(range(len(params))).difference(sharded):
            results[index] = function(low[index])
        matrices = self._assigned([params[index] for index in sharded])
        whole = self._gathered(matrices, [low[index] for index in sharded])
        for number in whole:
            whole[number] = function(whole[number])
        for index, part in zip(sharded, self._scattered(matrices, whole), strict=True):
            results[index] = part
        return results

    def _assigned(self, params: Sequence[torch.Tensor]) -> list[_Matrix]:
        """Assign each matrix, largest first, to the rank with the least work so far. All ranks compute the same."""
        work = [math.prod(parameter.shape) * min(parameter.shape) for parameter in params]
        owners: dict[int, Place] = {}
        for number in sorted(range(len(params)), key=lambda number: -work[number]):
            place = min(self._places, key=lambda place: self._work[place])
            self._work[place] += work[number]
            owners[number] = place
        return [self._matrix(parameter, owners[number]) for number, parameter in enumerate(params)]

    def _matrix(self, parameter: torch.Tensor, owner: Place) -> _Matrix:
        if not isinstance(parameter, DTensor) or parameter.device_mesh != self._mesh:
            raise AssertionError(f"expected a parameter sharded over {self._mesh}, got {type(parameter).__name__}")
        rows, columns = parameter.shape
        return _Matrix(shape=(rows, columns), dim=_shard_dim_of(parameter), owner=owner)

    def _gathered(self, matrices: list[_Matrix], parts: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the whole matrices that this rank owns, by number. The other ranks of its replica send their parts."""
        replica = self._own[0]
        mine = [number for number, matrix in enumerate(matrices) if matrix.owner == self._own]
        if self._num_shards == 1:
            return {number: parts[number] for number in mine}
        to_send = {
            place: [part for matrix, part in zip(matrices, parts, strict=True) if matrix.owner == place]
            for place in self._places
            if place[0] == replica
        }
        sizes = {
            (replica, index): [matrices[number].numel_of_part(index, self._num_shards) for number in mine]
            for index in range(self._num_shards)
        }
        received = self._exchanged(to_send, sizes)
        whole = {number: self._new(*matrices[number].shape) for number in mine}
        for (_, index), flat in received.items():
            for number, part in zip(mine, flat, strict=True):
                _slice(whole[number], matrices[number], index, self._num_shards).copy_(
                    part.view(_shape_of_part(matrices[number], index, self._num_shards))
                )
        return whole

    def _scattered(self, matrices: list[_Matrix], whole: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's part of every matrix, which the owners send to all replicas."""
        if len(self._places) == 1:
            return [whole[number] for number in range(len(matrices))]
        to_send = {
            place: [_slice(whole[number], matrices[number], place[1], self._num_shards) for number in whole]
            for place in self._places
        }
        index = self._own[1]
        numbers = {
            place: [number for number, matrix in enumerate(matrices) if matrix.owner == place] for place in self._places
        }
        sizes = {
            place: [matrices[number].numel_of_part(index, self._num_shards) for number in of_place]
            for place, of_place in numbers.items()
        }
        received = self._exchanged(to_send, sizes)
        parts = {
            number: flat
            for place, of_place in numbers.items()
            for number, flat in zip(of_place, received[place], strict=True)
        }
        return [
            parts[number].view(_shape_of_part(matrix, index, self._num_shards))
            for number, matrix in enumerate(matrices)
        ]

    def _exchanged(
        self, to_send: dict[Place, list[torch.Tensor]], sizes: dict[Place, list[int]]
    ) -> dict[Place, list[torch.Tensor]]:
        """Send tensors by one all-to-all. Return the received tensors, flat. `sizes`: their numbers of elements."""
        parts = [[part.flatten() for part in to_send.get(place, [])] for place in self._places]
        sent = torch.cat([self._new(0), *(part for of_place in parts for part in of_place)])
        totals = [sum(sizes.get(place, [])) for place in self._places]
        received = self._new(sum(totals))
        splits = [sum(part.numel() for part in of_place) for of_place in parts]
        issue(
            lambda: dist.all_to_all_single(received, sent, totals, splits, group=self._group),
            IssuedCollective("all_to_all", sent, STEP, self._group),
            self._listeners,
        )
        by_place = zip(self._places, torch.split(received, totals), strict=True)
        return {place: list(torch.split(flat, sizes[place])) for place, flat in by_place if place in sizes}

    def _new(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self._device)


def _shard_dim_of(parameter: DTensor) -> int:
    """Return the dimension over which a parameter of a wrapped model is sharded."""
    placement = parameter.placements[-1]
    if not isinstance(placement, Shard):
        raise AssertionError(f"expected a parameter that FSDP2 sharded, got placements {parameter.placements}")
    return placement.dim


def _shape_of_part(matrix: _Matrix, index: int, num_shards: int) -> tuple[int, int]:
    length, other = matrix.part(index, num_shards)[1], matrix.shape[1 - matrix.dim]
    return (length, other) if matrix.dim == 0 else (other, length)


def _slice(whole: torch.Tensor, matrix: _Matrix, index: int, num_shards: int) -> torch.Tensor:
    return whole.narrow(matrix.dim, *matrix.part(index, num_shards))


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Return the orthogonalization of a 2-D bf16 `matrix`, which is overwritten, by the ops of `torch.optim.Muon`.

    These are Newton-Schulz iterations of the quintic polynomial with these coefficients, on the matrix of norm 1.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _lr_factor(adjust_lr_fn: str | None, shape: torch.Size) -> float:
    """Return the factor by which `torch.optim.Muon` multiplies the learning rate of a matrix of this shape."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


_OPTIONS = frozenset(
    {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}
)


def _refuse_others(optimizer: torch.optim.Optimizer) -> None:
    """Refuse options of a newer torch's Muon."""
    unknown = sorted(optimizer.defaults.keys() - _OPTIONS - {"differentiable"})  # added by `Optimizer.load_state_dict`
    if unknown:
        raise StepError(
            f"torch.optim.Muon of torch {torch.__version__} has the option {unknown[0]}, which zeroamp does not "
            "support. Use torch 2.13, or a newer zeroamp."
        )
