"""Clips the gradients of models and of parts of a pipeline, and sums those of a weight that two stages have.

For loops without `TrainStep`: torch's schedules run the backwards of a pipeline, and no rank has the whole model.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from zeroamp.hooks._torch.dtensor import root_of
from zeroamp.hooks._torch.parameter_group import release_groups
from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import STEP, IssuedCollective
from zeroamp.planning.mesh import device_of, local_part, process_group
from zeroamp.policies.errors import StepError, describe
from zeroamp.training.arithmetic import StepArithmetic
from zeroamp.training.gradients import Gradients
from zeroamp.training.norm_and_clip import clip_factor, multiply_gradients
from zeroamp.training.refused_arguments import checked_max_norm
from zeroamp.wrapping.state import WrapState, wrap_state

_tied: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Weight given to `sum_tied_gradients` -> whether the norm counts it, and not the other copy."""


def clip_grad_norm_(
    parts: nn.Module | Iterable[nn.Module], max_norm: float, *, mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """Clip gradients by their norm over all parts and ranks, as `torch.nn.utils.clip_grad_norm_` does in one process.

    For loops without `TrainStep`. All ranks that train the model call it once per optimizer step, after the backward or
    after `schedule.step()`. It costs one all-reduce of one fp64 number. The norm has the bits of
    `TrainStep.clip_grad_norm`.

    Args:
        parts: a wrapped model, or all parts of the model that this rank has.
        max_norm: the largest 2-norm. 0 or inf: nothing is clipped.
        mesh: all ranks that train the model, with the pipeline axis. None: all ranks of the mesh that `wrap_model` got
            a slice of, if that mesh has an axis "pp"; else the ranks of the model.

    Returns:
        The norm before clipping: 0-D fp32, on the device. The host does not wait for it.

    Raises:
        StepError: there is no part, the mesh lacks ranks of a part, a backward has not reduced its gradients, a
            `TrainStep` runs an optimizer step of a part, or `max_norm` is negative or NaN.
        WrapError: a part is not wrapped.

    Examples:
        >>> model = zeroamp.wrap_model(nn.Linear(2, 1, bias=False), zeroamp.policy_from_config({}))
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> zeroamp.clip_grad_norm_(model, 1.0)
        tensor(5.)
    """
    limit = checked_max_norm(max_norm)
    states = [wrap_state(part) for part in ([parts] if isinstance(parts, nn.Module) else parts)]
    if not states:
        raise StepError("clip_grad_norm_ got no part. Pass the wrapped model, or all parts that this rank has.")
    for state in states:
        refuse_unreduced(state, "clip_grad_norm_")
    gradients = [Gradients(state) for state in states]
    group, num_ranks = _ranks_of(states, mesh)
    squares = torch.stack([squares_of(*each, num_ranks) for each in zip(states, gradients, strict=True)]).sum()
    issued = IssuedCollective("all_reduce", squares, STEP, group)
    issue(lambda: dist.all_reduce(squares, group=group), issued, states[0].listeners)
    norm = squares.sqrt().float()
    if 0 < limit < math.inf:
        for each in gradients:
            multiply_gradients(each.present(), clip_factor(norm, limit))
    return norm


def sum_tied_gradients(weight: nn.Parameter, other: nn.Parameter | int, group: dist.ProcessGroup | None = None) -> None:
    """Add the gradients of the two copies of one weight, as of a head that is tied to the embedding of another stage.

    Both copies then have the sum, in fp32, and `clip_grad_norm_` counts it once. Call it in each optimizer step after
    `schedule.step()` and before `clip_grad_norm_`, on the ranks of both stages. The copies must begin with equal values
    and be trained by equal optimizers.

    Args:
        weight: this rank's copy, of a wrapped part.
        other: the other copy: a parameter, if this rank has both (in schedules of a V, one rank has the first and the
            last stage); else the rank in `group` that has it.
        group: the ranks of the pipeline axis: `mesh["pp"].get_group()`.

    Raises:
        StepError: the copies differ in their shapes or shards, a copy is not a sharded parameter with an fp32 gradient,
            or `other` is this rank.
    """
    own, is_counted = _local_gradient(weight), True
    if isinstance(other, int):
        if other == (own_rank := dist.get_rank(group)):
            raise StepError(
                f"sum_tied_gradients got {other}, this rank itself, as the rank that has the other copy. Pass the rank "
                'in group=mesh["pp"].get_group() that has it, or the parameter, if it is on this rank.'
            )
        is_counted = own_rank < other
        if weight not in _tied:
            shape = torch.tensor([*own.shape, *[0] * (8 - own.ndim)], device=own.device)
            _refuse_other_shape(own, [size for size in _exchanged(shape, other, group).tolist() if size])
        own += _exchanged(own, other, group)
    else:
        _refuse_other_shape(own, (theirs := _local_gradient(other)).shape)
        own += theirs
        theirs.copy_(own)
        _tied[other] = False
    _tied[weight] = is_counted


def refuse_unreduced(state: WrapState, call: str) -> None:
    """Raise StepError unless the last backward of a part has reduced its gradients. Reshards the part."""
    state.step.refuse_after_failure(call)
    state.step.refuse_unfinished(call)
    if any(group.is_pending or group.awaits_replicas for group in state.gradients):
        raise StepError(
            f"{call} was called, but the last backward did not reduce its gradients. Call it after the last backward "
            "of an optimizer step, or after schedule.step()."
        )
    release_groups(group.group for group in state.gradients)  # a forward may have left groups unsharded


def _ranks_of(states: Sequence[WrapState], mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup | None, int]:
    """Return a process group of all ranks that train the parts, and their number."""
    axes = states[0].axes
    if mesh is None:
        if axes.stages is None:
            return states[0].world, axes.whole.size()
        mesh = root_of(axes.stages)
    ranks = set(mesh.mesh.flatten().tolist())
    for state in states:
        of_part = [each for each in (state.axes.whole, state.axes.stages) if each is not None]
        if missing := sorted({rank for each in of_part for rank in each.mesh.flatten().tolist()} - ranks):
            raise StepError(
                f"clip_grad_norm_ got a mesh of the ranks {sorted(ranks)}, without rank {missing[0]}, which has shards "
                "of a part. Pass the mesh of all ranks that train the model, with the pipeline axis."
            )
    return process_group(mesh), len(ranks)


def squares_of(state: WrapState, gradients: Gradients, num_ranks: int) -> torch.Tensor:
    """Return this rank's part of the sum of squares over `num_ranks` ranks: 0-D fp64, on the device of the mesh.

    If the mesh has further axes over which a part is not parallel, such as a tensor axis that another part uses, each
    rank of these axes has a copy of the shard. The sum counts it once.
    """
    axes = state.axes
    num_copies = 1 if axes.stages is None else num_ranks // (axes.stages.size() * axes.whole.size())
    counted = [each for each in gradients.present() if is_counted(each)]
    return StepArithmetic(state, gradients).local_squares(counted).to(device_of(state.mesh)) / num_copies


def is_counted(weight: torch.Tensor) -> bool:
    """Return whether a weight is counted. Of two copies that `sum_tied_gradients` got, only the first is."""
    return bool(_tied.get(weight, True))  # type: ignore[no-untyped-call]


def is_summed(weight: torch.Tensor) -> bool:
    """Return whether `sum_tied_gradients` got the weight."""
    return weight in _tied


def _local_gradient(weight: nn.Parameter) -> torch.Tensor:
    """Return this rank's shard of the gradient; zeros, which become the gradient, if there is none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    if not isinstance(weight, DTensor) or weight.grad.dtype != torch.float32:
        found = f"a {type(weight).__name__} with a gradient in {weight.grad.dtype}"
        remedy = "Call it after schedule.step(), with a parameter of a part that wrap_model returned."
        raise StepError(describe("sum_tied_gradients(weight=)", found, "a sharded fp32 parameter", remedy))
    return local_part(weight.grad)


@torch.no_grad()
def _exchanged(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Send a tensor to `peer`, and return the one that it sends, of the same shape and dtype."""
    received = torch.empty_like(tensor)
    both = (dist.isend, tensor), (dist.irecv, received)
    calls = [dist.P2POp(call, each, group=group, group_peer=peer) for call, each in both]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return received


def _refuse_other_shape(own: torch.Tensor, other: Sequence[int]) -> None:
    if tuple(own.shape) != tuple(other):
        raise StepError(
            f"sum_tied_gradients got a weight whose shard is {tuple(own.shape)} here, but {tuple(other)} in the other "
            "copy. Wrap both parts over as many ranks, with the same policy."
        )
