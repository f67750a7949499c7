"""The gradients of one parameter group of FSDP2, from its forwards to its reduction.

[Note: Zeros for unused parameters]
FSDP2 copies the gradients of a group into one flat buffer and reduces it. If ranks used different parameters, their
buffers would differ in size. So a group whose unit ran reduces zeros for each trainable parameter without a gradient. A
group whose unit did not run reduces nothing. FSDP2's own flag (torch 2.13) reduces zeros for such groups too.

[Note: One dtype per reduction]
FSDP2 reduces gradients of one dtype. Earlier micro-batches leave sums in the accumulation dtype. A parameter that was
first used, or unfrozen, in the last micro-batch has a gradient in its own dtype. This gradient is cast to the dtype of
the sums. From torch 2.15 on, autograd itself sums in the accumulation dtype.

[Note: Reducing once]
A module may run several times before a backward. FSDP2 ends a group's backward, and reduces it, with each run, but
autograd hands out a parameter's gradient after all runs. So a run that leaves a trainable parameter without a new
gradient only reshards the group, if earlier runs of it are left. The last one reduces. If it does not come, because the
loss does not depend on it, FSDP2 reduces the group at the end of the whole backward.
A head may run for each chunk of a sequence, and is better not resharded in between. After `reduce_once`, only the first
run of a forward ends the group's backward, because the backward of that run comes last. If further gradients of the
group come after it, FSDP2 reduces them at the end of the whole backward.

[Note: Sums that await their replicas]
With HSDP, each replica sums the micro-batches of an optimizer step, and these sums are summed over replicas once. FSDP2
adds the reductions of the micro-batches in `parameter.grad`. The hook of the last one moves them from there into the
flat reduced shard (`add_partial_sums`), before the sum over replicas, and FSDP2 makes `parameter.grad` from the result.
A group that ran in an earlier micro-batch but not in the last one reduces zeros in the last one. Loops of other
libraries may continue an optimizer step after its last micro-batch. `parameter.grad` then holds a gradient that is
summed over all replicas and divided. It is set aside while a replica sums its next micro-batches, and is added to their
result.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dispatch import is_in_backward, runs_autograd_node
from zeroamp.hooks._torch.parameter_group import GroupParameter, ParameterGroup, parameter_groups
from zeroamp.hooks.guards import refuse_create_graph
from zeroamp.hooks.tensors import hold_for_current_stream
from zeroamp.policies.errors import WrapError


class GroupGradients:
    """Tracks which parameters of a group this rank used, and completes the group's gradients before a reduction."""

    def __init__(self, group: ParameterGroup, module: FSDPModule) -> None:
        """Take the group, and the unit or group holder that has it."""
        self.group = group
        self.module = module
        self._num_forwards = 0  # with gradients on, whose backward has not ended
        self._reduces_once = False
        self._is_pending = False  # a backward ended without a reduction
        self._awaits_reduction = False  # the same, whether or not the unit ran on this rank
        self.reduces_sums = False
        """Whether the current reduction is of sums of several micro-batches. Equal on all ranks, because it depends on
        FSDP2's flags alone, not on which parameters were used."""
        self._used: set[int] = set()  # positions in `group.parameters`
        self._completed: set[int] = set()  # positions of those that were reduced as zeros
        self.filled: set[int] = set()
        """Positions of the parameters whose gradient, if they have one, is zeros only on this rank. Unlike `used`, this
        does not depend on `reset`, which a loop without `TrainStep` does not call."""
        self.sums_replicas = True
        """Whether the next reduction is also summed over replicas. False before the last micro-batch of an optimizer
        step, if replicas are summed once per step."""
        self._awaits_replicas = False  # `parameter.grad` holds sums of this replica alone
        self._in_reduction: list[int] = []  # positions in the flat gradients that are reduced now
        self._of_all_replicas: dict[int, torch.Tensor] = {}  # position -> `parameter.grad` before such sums
        self._pre_forward_of_fsdp = group.replace("pre_forward", self._pre_forward)
        self.post_backward_of_fsdp = group.replace("post_backward", self._post_backward)
        """Reduces the group's gradients, which are complete then. An extension may put a function around it."""

    @property
    def used(self) -> frozenset[int]:
        """Positions in `parameters` of the parameters that had a gradient on this rank since `reset`."""
        return frozenset(self._used)

    @property
    def is_pending(self) -> bool:
        """Whether a backward of the group has ended without a reduction."""
        return self._is_pending

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters of the group."""
        return [parameter.sharded for parameter in self.group.parameters]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The unsharded parameters, which are autograd's leaves. Empty before the first unshard."""
        return [each.unsharded for each in self.group.parameters if each.unsharded is not None]

    def only_zeros(self) -> list[nn.Parameter]:
        """Return the sharded parameters that this rank has not used since `reset`, and that were reduced as zeros."""
        if not self._completed:
            return []
        return [self.group.parameters[index].sharded for index in self._completed - self._used]

    def reduce_once(self) -> None:
        """Reduce the group once per backward, however often its module runs: see [Note: Reducing once]. Call once."""
        self._reduces_once = True
        self.group.end_backward_if(lambda: self._num_forwards == 1 and not is_in_backward())

    def end_backward(self) -> None:
        """Discard the count of forwards whose backward did not run. Call after each backward of the root."""
        self._num_forwards = 0

    def reset(self) -> None:
        """Begin the next optimizer step: clear `used`, and release all partial sums."""
        self._num_forwards, self._is_pending, self._awaits_replicas = 0, False, False
        self._awaits_reduction = False
        self._of_all_replicas.clear()
        self._used.clear()
        self._completed.clear()
        self.group.discard_replica_sums()

    @property
    def _is_last_with_partial_sums(self) -> bool:
        if self._awaits_replicas:
            return self.sums_replicas
        return self.group.completes_replica_sums

    def add_partial_sums(self, reduced: torch.Tensor) -> bool:
        """Add earlier micro-batches to this rank's flat reduced shard; return whether to sum it over replicas now.

        See [Note: Sums that await their replicas]. Call in the hook of `set_all_reduce_hook`.

        Raises:
            RuntimeError: a parameter was frozen between two micro-batches, so its sum cannot be completed.
        """
        if not self.sums_replicas:
            if not self._awaits_replicas:
                self._set_aside()
            self._awaits_replicas = True
            return False
        if not self._awaits_replicas:
            return True
        self._awaits_replicas, offset = False, 0
        for index, parameter in enumerate(self.group.parameters):
            sharded = parameter.sharded
            if index not in self._in_reduction:
                if sharded.grad is not None or index in self._of_all_replicas:
                    raise RuntimeError(
                        f"A parameter of shape {tuple(sharded.shape)} was frozen between two micro-batches of an "
                        "optimizer step. With replicas (HSDP) the sum of its gradients cannot be completed then. "
                        "Freeze it between two optimizer steps."
                    )
                continue
            shard = parameter.shard_of(reduced, offset)
            if sharded.grad is not None:
                partial = cast(DTensor, sharded.grad).to_local()
                shard.add_(partial.to(reduced.device, non_blocking=True))
                hold_for_current_stream(partial)
                sharded.grad = None
            sharded.grad = self._of_all_replicas.pop(index, None)  # to which FSDP2 adds the result
            offset += parameter.padded_shard_numel(self.group.num_shards)
        return True

    def _awaits_earlier_run(self) -> bool:
        """Return whether the backward of an earlier run will bring gradients that are missing now."""
        if self._num_forwards < 2 or self._reduces_once or not self.group.reduces:
            return False
        return self.group.lacks_new_gradient(has_sums=self._is_pending) and runs_autograd_node()

    def _set_aside(self) -> None:
        """Move gradients of all replicas out of `parameter.grad`, if the step continues after its last reduction."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self._of_all_replicas[index] = parameter.grad
                parameter.grad = None

    def _pre_forward(self, *args: Any) -> Any:
        self._num_forwards += torch.is_grad_enabled()
        if replaced := self.group.follow_changes():
            raise WrapError(
                f"The FSDP unit of {replaced} was called with another tensor in the place of that parameter, as by "
                "torch.func.functional_call. FSDP2 would use the parameter. Call the op itself with the tensor "
                "(torch.nn.functional.linear), or make a module around this call the unit (auto_wrap_policy)."
            )
        return self._pre_forward_of_fsdp(*args)

    def _post_backward(self, *unused: Any) -> Any:
        group = self.group
        refuse_create_graph()
        found = group.unsharded_gradients()
        if found is None:
            return None  # the unit has never run. FSDP2's own post-backward would raise if it does not reduce
        used, has_sums, lacks_gradient = found
        ran = self._num_forwards > 0
        if self._awaits_earlier_run():
            self._num_forwards -= 1
            self._used.update(used)
            group.reshard_in_backward()
            return None
        self._num_forwards = 0 if self._reduces_once else self._num_forwards - ran
        self._used.update(used)
        self.reduces_sums, self._awaits_reduction = self._awaits_reduction, not group.reduces
        if not group.reduces:
            self._is_pending |= ran or bool(used)
        elif ran or used or self._is_pending or self._is_last_with_partial_sums:
            self._is_pending = False
            if self.filled:
                self.filled.difference_update(used)
            if has_sums or lacks_gradient:  # otherwise all trained parameters have gradients, of one dtype
                zeros = _complete(group.parameters)
                self._completed.update(zeros)
                self.filled.update(i for i in zeros if group.parameters[i].sharded.grad is None)
                used = [i for i, parameter in enumerate(group.parameters) if parameter.has_gradient]
            self._in_reduction = used
        return self.post_backward_of_fsdp(*unused)


def follow_gradients(root: nn.Module) -> list[GroupGradients]:
    """Attach a `GroupGradients` to each parameter group of a root. Call once, after `fully_shard` of all units."""
    places = {
        id(parameter): (module._parameters, name, f"{fqn}.{name}" if fqn else name)
        for fqn, module in root.named_modules()
        for name, parameter in module._parameters.items()
    }
    found = [GroupGradients(group, module) for group, module in parameter_groups(root)]
    for each in found:
        each.group.places = [places[id(parameter)] for parameter in each.parameters]
    return found


def by_module(gradients: Iterable[GroupGradients]) -> dict[FSDPModule, GroupGradients]:
    """Return a dict from each module with a parameter group of its own to that group's `GroupGradients`."""
    return {each.module: each for each in gradients}


def _complete(parameters: list[GroupParameter]) -> list[int]:
    """Give each trainable parameter a gradient, all in one dtype; return the positions of those that are zeros.

    See [Note: Zeros for unused parameters] and [Note: One dtype per reduction].
    """
    dtype = next((each.own_sum.dtype for each in parameters if each.own_sum is not None), None)
    zeros = []
    for index, parameter in enumerate(parameters):
        unsharded = parameter.unsharded
        if unsharded is None:
            raise AssertionError("expected an unsharded parameter: the group has gradients")
        if parameter.has_gradient:
            gradient = unsharded.grad
        elif unsharded.requires_grad:
            gradient = _zeros_like(unsharded, dtype or getattr(unsharded, "grad_dtype", None))
            zeros.append(index)
        else:
            continue
        if dtype is None:
            unsharded.grad = gradient
        elif parameter.own_sum is None and gradient is not None:
            parameter.set_sum(gradient.to(dtype))
    return zeros


def _zeros_like(unsharded: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return zeros of the shape of an unsharded parameter, in `dtype`, by default its own.

    torchao's float8 parameters have no `torch.zeros_like`.
    """
    if isinstance(unsharded, DTensor):
        return torch.zeros_like(unsharded, dtype=dtype)
    return torch.zeros(unsharded.shape, dtype=dtype or unsharded.dtype, device=unsharded.device)
