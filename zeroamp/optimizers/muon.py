"""`torch.optim.Muon` on shards: one rank orthogonalizes each matrix, everything else is element-wise.

[Note: One owner per matrix]
    every rank    momentum and update of its shards, in fp32, rounded to bf16
    all-to-all    the shards of a matrix go to its owner, in bf16
    owner         Newton-Schulz of the whole matrix, in bf16
    all-to-all    the parts of the result go to the ranks that hold the shards, in bf16
    every rank    weight decay and update of its shards, in fp32

The bits are those of `torch.optim.Muon` in one process: Newton-Schulz rounds its input to bf16 before anything else,
and all other operations are element-wise. Each matrix is gathered once. DTensors would gather it for every product.

Per optimizer step a rank sends 2 bytes per element of its shards, and 2 bytes per element of the matrices it owns. An
fp32 all-gather of all gradients would send 4 bytes per element of all matrices. Each replica of HSDP does so by itself.
At stage 0 every rank orthogonalizes all matrices, and sends nothing.

A rank holds the bf16 shards it sends, the bf16 matrices it owns, and the bf16 parts it receives, until the update ends.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import STEP, IssuedCollective
from zeroamp.planning.mesh import device_of, local_part, shard_size
from zeroamp.policies.errors import StepError
from zeroamp.wrapping.optimizer_hooks import OwnedOptimizers
from zeroamp.wrapping.state import WrapState, wrap_state


@contextmanager
def updating_matrices(state: WrapState, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Update the shards of a wrapped model when `optimizer.step()`, a `torch.optim.Muon`'s, is called in the context.

    The update is the last hook before the step. Muon skips parameters without a gradient: the step finds none, and the
    context sets them again.
    """
    gradients: dict[torch.Tensor, torch.Tensor] = {}

    def before(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        _update(state, optimizer, gradients)

    handle = optimizer.register_step_pre_hook(before)
    try:
        _refuse_others(optimizer)
        yield
    finally:
        handle.remove()
        _set_again(gradients)


def update_matrices_in_steps(root: ref[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Update the shards of a wrapped model in each later `optimizer.step()` of a loop without `TrainStep`.

    Call it once per optimizer. It may be called in a global step pre-hook: the hooks that it registers then run in the
    same step.
    """
    if optimizer in _updated_in_steps:
        return
    _updated_in_steps.add(optimizer)
    gradients: dict[torch.Tensor, torch.Tensor] = {}

    def before(_optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        model = root()
        if OwnedOptimizers.is_updating or model is None:
            return
        _refuse_others(optimizer)
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise StepError(
                "Muon.step was called with a closure, which is not supported for a wrapped model. Call "
                "loss.backward() before optimizer.step()."
            )
        _update(wrap_state(model), optimizer, gradients)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: _set_again(gradients))


_updated_in_steps: "WeakSet[torch.optim.Optimizer]" = WeakSet()


@torch.no_grad()
def _update(state: WrapState, optimizer: torch.optim.Optimizer, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
    """Update all matrices, and move their gradients to `gradients`."""
    update = ShardedMuon(state)
    for group in optimizer.param_groups:
        update(group, optimizer.state)
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradients[parameter], parameter.grad = parameter.grad, None


def _set_again(gradients: dict[torch.Tensor, torch.Tensor]) -> None:
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    gradients.clear()


class ShardedMuon:
    """Updates the matrices of one optimizer step, one param group after the other: see [Note: One owner per matrix]."""

    def __init__(self, state: WrapState) -> None:
        """Take the process group of the ranks that shard, and the listeners to its collectives."""
        axis = state.mesh.ndim - 1
        self._num_shards = shard_size(state.mesh)
        self._group, self._rank = state.mesh.get_group(axis), state.mesh.get_local_rank(axis)
        self._listeners, self._device = state.listeners, device_of(state.mesh)
        self._work = [0] * self._num_shards
        """Rank -> multiplications of the matrices that it owns, over all param groups of this optimizer step."""

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

    def _orthogonalized(
        self,
        params: list[torch.Tensor],
        low: list[torch.Tensor],
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return this rank's parts of the orthogonalized matrices, bf16.

        A matrix that is not a DTensor is one of `ignored_params`: every rank orthogonalizes its own copy.
        """
        results = list(low)
        dims = {index: _shard_dim_of(each) for index, each in enumerate(params) if isinstance(each, DTensor)}
        for index, update in enumerate(low):
            if index not in dims or self._num_shards == 1:
                results[index] = function(update)
        if not dims or self._num_shards == 1:
            return results
        shapes = {
            index: [part.shape for part in self._parts(torch.empty(params[index].shape, device="meta"), dim)]
            for index, dim in dims.items()
        }
        owned = self._owned({index: params[index].shape for index in dims})
        mine = owned[self._rank]
        gathered = self._exchanged(
            [[low[index] for index in indices] for indices in owned],
            [[shapes[index][rank] for index in mine] for rank in range(self._num_shards)],
        )
        whole = {
            index: function(torch.cat([*parts], dims[index])) for index, *parts in zip(mine, *gathered, strict=True)
        }
        to_send = [self._parts(whole[index], dims[index]) for index in mine]
        received = self._exchanged(
            [[parts[rank] for parts in to_send] for rank in range(self._num_shards)],
            [[shapes[index][self._rank] for index in indices] for indices in owned],
        )
        for indices, parts in zip(owned, received, strict=True):
            for index, part in zip(indices, parts, strict=True):
                results[index] = part
        return results

    def _parts(self, whole: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Return the part of each rank, as FSDP2 shards a matrix: `chunk`, and empty parts for the other ranks."""
        parts = list(whole.chunk(self._num_shards, dim))
        return parts + [whole.narrow(dim, 0, 0)] * (self._num_shards - len(parts))

    def _owned(self, shapes: Mapping[int, torch.Size]) -> list[list[int]]:
        """Return the indices of the matrices that each rank owns. All ranks of a replica compute the same.

        Each matrix, largest first, is assigned to the rank with the least work so far.
        """
        work = {index: math.prod(shape) * min(shape) for index, shape in shapes.items()}
        owned: list[list[int]] = [[] for _ in range(self._num_shards)]
        for index in sorted(work, key=lambda index: -work[index]):
            rank = self._work.index(min(self._work))
            self._work[rank] += work[index]
            owned[rank].append(index)
        return owned

    def _exchanged(self, to_send: list[list[torch.Tensor]], shapes: list[list[torch.Size]]) -> list[list[torch.Tensor]]:
        """Send tensors to each rank by one all-to-all. Return those of each rank, which have these `shapes`."""
        sent = torch.cat([self._new(0), *(each.flatten() for of_rank in to_send for each in of_rank)])
        sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
        totals, splits = (
            [sum(of_rank) for of_rank in sizes],
            [sum(each.numel() for each in of_rank) for of_rank in to_send],
        )
        received = self._new(sum(totals))
        issue(
            lambda: dist.all_to_all_single(received, sent, totals, splits, group=self._group),
            IssuedCollective("all_to_all", sent, STEP, self._group),
            self._listeners,
        )
        return [
            [flat.view(shape) for flat, shape in zip(torch.split(of_rank, lengths), of_shapes, strict=True)]
            for of_rank, lengths, of_shapes in zip(torch.split(received, totals), sizes, shapes, strict=True)
        ]

    def _new(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=torch.bfloat16, device=self._device)


def _shard_dim_of(parameter: DTensor) -> int:
    """Return the dimension over which a parameter of a wrapped model is sharded."""
    placement = parameter.placements[-1]
    if not isinstance(placement, Shard):
        raise AssertionError(f"expected a parameter that FSDP2 sharded, got placements {parameter.placements}")
    return placement.dim


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
