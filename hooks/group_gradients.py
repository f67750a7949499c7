"""The gradients of one parameter group of FSDP2, from its forwards to its reduction.

[Note: Zeros for unused parameters]
FSDP2 copies the gradients of a group into one flat buffer and reduces it. If ranks used different parameters, their
buffers would differ in size. So a group whose unit ran reduces zeros for each trainable parameter without a gradient. A
group whose unit did not run reduces nothing. FSDP2's own flag (torch 2.13) reduces zeros for such groups too.

[Note: One dtype per reduction]
FSDP2 reduces gradients of one dtype. Earlier micro-batches leave sums in the accumulation dtype. A parameter that was
first used, or unfrozen, in the last micro-batch has a gradient in its own dtype. This gradient is cast to the dtype of
the sums (pytorch issue 196996). From torch 2.15 on, autograd itself sums in the accumulation dtype.

[Note: Reducing once]
A module may run several times before a backward. FSDP2 ends a group's backward, and reduces it, with each run, but
autograd hands out a parameter's gradient after all runs. So a run that leaves a trainable parameter without a new
gradient only reshards the group, if earlier runs of it are left. The last one reduces. If it does not come, because the
loss does not depend on it, FSDP2 reduces the group at the end of the whole backward.
A head may run for each chunk of a sequence, and is better not resharded in between. After `reduce_once`, only the first
run of a forward ends the group's backward, because the backward of that run comes last. If further gradients of the
group come after it, FSDP2 reduces them at the end of the whole backward.

[Note: The rest of a backward]
Autograd ends a unit's backward only if an input of the unit requires a gradient. FSDP2 reduces the other groups when
the whole backward ends, in the order of the module tree, the root first. Ranks may differ in which groups these are.
Example: on one rank, the input of the first block is the output of a frozen embedding. On another rank, the output of
a vision tower is added, which requires a gradient. Then these ranks would reduce the block's group and the root's group
in different orders, and add the gradients of one group to those of the other. So the other groups are reduced in the
order in which autograd would have reduced them: the group that began its first forward last comes first, and the root
comes last.

[Note: Aliases]
FSDP2 replaces the inputs of a unit by aliases, all made by one autograd function. The backward of this function ends
the backward of the group. Autograd runs functions in the reverse order of the forward, so one alias is enough: the
function runs after all others of the unit. If a tensor outside of lists and dicts needs a gradient, tensors in lists
and dicts get no alias. Through an alias, autograd would run the backward of a tensor that the unit does not read, and
whose graph may be freed.

[Note: Sums that await their replicas]
With HSDP, each replica sums the micro-batches of an optimizer step, and these sums are summed over replicas once. FSDP2
adds the reductions of the micro-batches in `parameter.grad`. The hook of the last one moves them from there into the
flat reduced shard (`add_partial_sums`), before the sum over replicas, and FSDP2 makes `parameter.grad` from the result.
A group that ran in an earlier micro-batch but not in the last one reduces zeros in the last one. Loops of other
libraries may continue an optimizer step after its last micro-batch. `parameter.grad` then holds a gradient that is
summed over all replicas and divided. It is set aside while a replica sums its next micro-batches, and is added to their
result.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dispatch import is_in_backward, is_view, runs_autograd_node
from zeroamp.hooks._torch.parameter_group import (
    GroupParameter,
    ParameterGroup,
    discard_replica_sums,
    in_backward,
    parameter_groups,
    unshard_before_backward_of,
)
from zeroamp.hooks.callers_containers import CallersContainers
from zeroamp.hooks.collectives.gradient_reduction import GroupReduceScatter
from zeroamp.hooks.guards import refuse_create_graph
from zeroamp.hooks.root_forward import ForwardCall, ForwardContext
from zeroamp.hooks.tensors import direct_tensors, hold_for_current_stream, may_have_tensors, tensors_in
from zeroamp.policies.errors import StepError, WrapError


class _RestOfBackward:
    """Reduces the groups of a root that autograd has not reached: see [Note: The rest of a backward]."""

    def __init__(self) -> None:
        self.groups: list[GroupGradients] = []
        self.num_forwards = 0
        """Forwards of all groups so far, with gradients on."""
        self._is_running = False

    def begins(self) -> bool:
        """Return whether FSDP2 begins to end a backward. Call outside of autograd's nodes, as FSDP2 does then."""
        return not self._is_running and is_in_backward()

    def run(self) -> None:
        """Reduce the rest. FSDP2 then finds that these groups have ended their backward."""
        self._is_running = True
        try:
            rest = [self.groups[index] for index in in_backward([each.group for each in self.groups])]
            for each in sorted(rest, key=lambda each: each.first_forward, reverse=True):
                each.group.end_backward()
        finally:
            self._is_running = False


class GroupGradients:
    """Tracks which parameters of a group this rank used, and completes the group's gradients before a reduction."""

    def __init__(
        self, group: ParameterGroup, module: FSDPModule, containers: CallersContainers, rest: _RestOfBackward
    ) -> None:
        """Take the group, and the unit or group holder that has it.

        All groups of the root share `containers`, which tracks the arguments of the units, and `rest`.
        """
        self.group = group
        self.module = module
        self.first_forward = 0
        """The position, among the forwards of all groups, of the first one here whose backward has not ended."""
        self._containers = containers
        self._rest = rest
        self._num_forwards = 0  # with gradients on, whose backward has not ended
        self._reduces_once = False
        self._is_pending = False  # a backward ended without a reduction
        self._awaits_reduction = False  # the same, whether or not the unit ran on this rank
        self.reduces_sums = False
        """Whether the current reduction is of sums of several micro-batches. Equal on all ranks, because it depends on
        FSDP2's flags alone, not on which parameters were used."""
        self.reduction: GroupReduceScatter | None = None
        """The reduction of the group. None before it is installed."""
        self.filled: set[int] = set()
        """Positions in `group.parameters` of those whose gradient, if they have one, is zeros only on this rank. The
        set stays valid if nobody clears it after a step, as in a loop without `TrainStep`."""
        self.has_sum: Callable[[nn.Parameter], bool] = lambda _parameter: False
        """Returns whether something else than FSDP2 holds the sum of a sharded parameter's earlier gradients."""
        self._awaits_replicas = False  # `parameter.grad` holds sums of this replica alone
        self._in_reduction: list[int] = []  # positions in the flat gradients that are reduced now
        self._of_all_replicas: dict[int, torch.Tensor] = {}  # position -> `parameter.grad` before such sums
        self._pre_forward_of_fsdp = group.replace("pre_forward", self._pre_forward)
        self._post_forward_of_fsdp = group.replace("post_forward", self._post_forward)
        self.post_backward_of_fsdp = group.replace("post_backward", self._post_backward)
        """Reduces the group's gradients, which are complete then. An extension may put a function around it."""

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward with gradients on has run whose backward has not ended."""
        return self._num_forwards > 0

    @property
    def is_pending(self) -> bool:
        """Whether a backward of the group has ended without a reduction."""
        return self._is_pending

    @property
    def awaits_replicas(self) -> bool:
        """Whether there are sums of this replica that are not summed over replicas yet."""
        return self._awaits_replicas or self.group.has_replica_sums

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters of the group."""
        return [parameter.sharded for parameter in self.group.parameters]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The unsharded parameters, which are autograd's leaves. Empty before the first unshard."""
        return [each.unsharded for each in self.group.parameters if each.unsharded is not None]

    def only_zeros(self) -> list[nn.Parameter]:
        """Return the sharded parameters whose gradient, if they have one, is zeros only on this rank: see `filled`."""
        return [self.group.parameters[index].sharded for index in sorted(self.filled)]

    def reduce_once(self) -> None:
        """Reduce the group once per backward, however often its module runs: see [Note: Reducing once]. Call once."""
        self._reduces_once = True
        self.group.end_backward_if(lambda: self._num_forwards == 1 and not is_in_backward())

    def lost_gradient(self) -> str:
        """Return the FQN of a parameter whose gradient was not reduced, though its unit ran; "" if there is none.

        FSDP2 reduces in hooks on the outputs of units. A loss that depends only on a tensor that a unit has stored runs
        none of these hooks (pytorch issue 173709). Call after a backward that reduces, for a group with a forward that
        awaits its backward.
        """
        for parameter, (_, _, fqn) in zip(self.group.parameters, self.group.places, strict=True):
            if parameter.unsharded is not None and parameter.has_gradient:
                return fqn
        return ""

    def add_partial_sums(self, reduced: torch.Tensor) -> bool:
        """Add earlier micro-batches to this rank's flat reduced shard; return whether to sum it over replicas now.

        See [Note: Sums that await their replicas]. Call in the hook of `set_all_reduce_hook`.

        Raises:
            RuntimeError: a parameter was frozen between two micro-batches, so its sum cannot be completed.
        """
        if not self.group.sums_replicas:
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
        if self._reduces_once or not self.group.reduces:
            return False
        return self.group.lacks_new_gradient(has_sums=self._is_pending) and runs_autograd_node()

    def _note_filled(self, zeros: list[int]) -> None:
        """Add to `filled` those of the parameters at these positions that have no gradient of an earlier backward."""
        if self.group.has_replica_sums:  # FSDP2 has the gradients of all parameters of the group
            return
        for index in zeros:
            sharded = self.group.parameters[index].sharded
            if sharded.grad is None and not self.has_sum(sharded):
                self.filled.add(index)

    def _set_aside(self) -> None:
        """Move gradients of all replicas out of `parameter.grad`, if the step continues after its last reduction."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self._of_all_replicas[index] = parameter.grad
                parameter.grad = None

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            self._rest.num_forwards += 1
            if self._num_forwards == 0:
                self.first_forward = self._rest.num_forwards
            self._num_forwards += 1
        if replaced := self.group.follow_changes():
            raise _was_replaced(replaced)
        if set_data := self.group.ignored_data():
            raise WrapError(
                f"{set_data}.data was set to another tensor, which a sharded parameter ignores. Write into the "
                "parameter instead: `with torch.no_grad(): parameter.copy_(tensor)`."
            )
        if torch.is_grad_enabled() and may_have_tensors(args, kwargs):
            return self._pre_forward_with_containers(module, args, kwargs)
        return self._pre_forward_of_fsdp(module, args, kwargs)

    def _pre_forward_with_containers(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let FSDP2 replace tensors that need a gradient, but not the containers around them: [Note: Aliases]."""
        tensors = [each for each in direct_tensors((args, *kwargs.values())) if each.requires_grad]
        if not tensors:
            tensors = [each for each in tensors_in((args, kwargs)) if each.requires_grad]
        of: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in tensors}
        aliases, _ = self._pre_forward_of_fsdp(module, tuple(of.values()), {})
        of = dict(zip(of, aliases, strict=True))
        added = self._unshard_before_backward_of
        return self._containers.map_arguments(module, lambda each: of.get(id(each), each), args, kwargs, added)

    def _unshard_before_backward_of(self, tensors: list[torch.Tensor]) -> None:
        unshard_before_backward_of(tensors, self.module, lambda: self.awaits_backward)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.is_grad_enabled():
            if isinstance(output, torch.Tensor):
                views = [output] if output.requires_grad and is_view(output) else []
            else:
                views = [each for each in tensors_in(output) if each.requires_grad and is_view(each)]
            if views:
                self._unshard_before_backward_of(views)
        return self._post_forward_of_fsdp(module, args, output)

    def _post_backward(self, *unused: Any) -> Any:
        if not runs_autograd_node() and self._rest.begins():
            self._rest.run()
            return None
        group = self.group
        if torch.is_grad_enabled():
            refuse_create_graph()
        found = group.unsharded_gradients()
        if found is None:
            return None  # the unit has never run. FSDP2's own post-backward would raise if it does not reduce
        used, has_sums, lacks_gradient = found
        ran = self._num_forwards > 0
        if self._num_forwards > 1 and self._awaits_earlier_run():
            self._num_forwards -= 1
            group.reshard_in_backward()
            return None
        self._num_forwards = 0 if self._reduces_once else self._num_forwards - ran
        reduces = group.reduces
        self.reduces_sums, self._awaits_reduction = self._awaits_reduction, not reduces
        if self.reduction is not None:
            self.reduction.reduces_sums = self.reduces_sums
        if not reduces:
            self._is_pending |= ran or bool(used)
        elif ran or used or self._is_pending or (self.awaits_replicas and group.sums_replicas):
            self._is_pending = False
            if self.filled:
                self.filled.difference_update(used)
            if has_sums or lacks_gradient:  # otherwise all trained parameters have gradients, of one dtype
                self._note_filled(_complete(group.parameters))
                used = [i for i, parameter in enumerate(group.parameters) if parameter.has_gradient]
            self._in_reduction = used
        return self.post_backward_of_fsdp(*unused)


def refuse_lost_gradients(groups: Iterable[GroupGradients], method: str) -> None:
    """Raise StepError for a gradient that was not reduced: see `GroupGradients.lost_gradient`."""
    for group in groups:
        if group.awaits_backward and (fqn := group.lost_gradient()):
            raise StepError(
                f"{method} was called, but the gradient of {fqn} was not reduced: the loss depends only on a tensor "
                "that a module has stored (self.kept = ...), not on the output of an FSDP unit. Return the tensor from "
                "the model's forward, and compute the loss from what the forward returned."
            )


def reset_gradients(groups: Sequence[GroupGradients]) -> None:
    """Begin the next optimizer step: release all partial sums."""
    for each in groups:
        each._num_forwards, each._is_pending, each._awaits_replicas = 0, False, False
        each._awaits_reduction = False
        each._of_all_replicas.clear()
    discard_replica_sums([each.group for each in groups])


def end_backward(groups: Iterable[GroupGradients]) -> None:
    """Discard the counts of forwards whose backward did not run. Call after each backward of the root."""
    for group in groups:
        group._num_forwards = 0


def _was_replaced(fqn: str) -> WrapError:
    return WrapError(
        f"The FSDP unit of {fqn} was called with another tensor in the place of that parameter: the parameter was "
        "replaced, parametrized or pruned after wrap_model, or torch.func.functional_call replaced it. FSDP2 would use "
        "the old parameter. Change parameters before wrap_model. In place of functional_call, call the op itself with "
        "the tensor (torch.nn.functional.linear), or make a module around this call the unit (auto_wrap_policy)."
    )


def refuse_replaced(gradients: Iterable[GroupGradients]) -> ForwardContext:
    """Return a `ForwardContext` that raises a WrapError if parameters were replaced before the first forward.

    At its first forward, FSDP2 takes the parameters that the modules have then. Each forward of a unit checks for later
    replacements.
    """
    unchecked = list(gradients)

    def look(_call: ForwardCall) -> None:
        while unchecked:
            if fqn := unchecked[-1].group.replaced():
                raise _was_replaced(fqn)
            unchecked.pop()

    return look


def follow_gradients(root: nn.Module, containers: CallersContainers) -> list[GroupGradients]:
    """Attach a `GroupGradients` to each parameter group of a root. Call once, after `fully_shard` of all units."""
    places = {
        id(parameter): (module._parameters, name, f"{fqn}.{name}" if fqn else name)
        for fqn, module in root.named_modules()
        for name, parameter in module._parameters.items()
    }
    rest = _RestOfBackward()
    found = rest.groups = [GroupGradients(group, module, containers, rest) for group, module in parameter_groups(root)]
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
