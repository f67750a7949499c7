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
FSDP2 ends a group's backward, and reduces it, with each run of its module: autograd hands out a parameter's gradient
after all runs, so all reductions but the last are of zeros. A head may run for each chunk of a sequence. After
`reduce_once`, only the first run of a forward ends the group's backward, because the backward of that run comes last.
If further gradients of the group come after it, FSDP2 reduces them at the end of the whole backward.

[Note: Sums that await their replicas]
With HSDP, each replica sums the micro-batches of an optimizer step, and these sums are summed over replicas once. FSDP2
adds the reductions of the micro-batches in `parameter.grad`. The hook of the last one moves them from there into the
flat reduced shard (`add_partial_sums`), before the sum over replicas, and FSDP2 makes `parameter.grad` from the result.
A group that ran in an earlier micro-batch but not in the last one reduces zeros in the last one. `TrainStep.reopen` may
continue an optimizer step after its last micro-batch. `parameter.grad` then holds a gradient that is summed over all
replicas and divided. It is set aside while a replica sums its next micro-batches, and is added to their result.

[Note: Unsharded sums in the order of the tree]
At stages 0 and 1, FSDP2 adds the unsharded gradients of the micro-batches one after the other. After
`add_in_tree_order`, the gradients of each micro-batch are moved into a `TreeSum` when the group's backward has ended.
The partial sums are added to the last micro-batch's gradients before the group is reduced. All sums are in fp32.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dispatch import is_in_backward
from zeroamp.hooks._torch.fsdp import groups_of, units_of
from zeroamp.hooks.collectives.micro_batch_sums import TreeSum
from zeroamp.hooks.tensors import hold_for_current_stream


class GroupGradients:
    """Tracks which parameters of a group this rank used, and completes the group's gradients before a reduction.

    Replaces two methods of FSDP2's `FSDPParamGroup` on the instance: no public hook runs between the last gradient of a
    group and its reduction.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._num_forwards = 0  # with gradients on, whose backward has not ended
        self._reduces_once = False
        self._is_pending = False  # a backward ended without a reduction
        self._used: set[int] = set()  # positions in `fsdp_params`
        self._completed: set[int] = set()  # positions of those that were reduced as zeros
        self.sums_replicas = True
        """Whether the next reduction is also summed over replicas. False before the last micro-batch of an optimizer
        step, if replicas are summed once per step."""
        self._awaits_replicas = False  # `parameter.grad` holds sums of this replica alone
        self._in_reduction: list[int] = []  # positions in the flat gradients that are reduced now
        self._of_all_replicas: dict[int, torch.Tensor] = {}  # position -> `parameter.grad` before such sums
        self.micro_batch = 0
        """The number of the micro-batch whose backward runs. Set before each backward if `add_in_tree_order` was."""
        self.take_sum: Callable[[nn.Parameter], TreeSum | None] | None = None
        """Removes a parameter's sum of earlier micro-batches from the `ShardAccumulator`, and returns it. None if these
        sums are in `parameter.grad`."""
        self._adds_in_tree_order = False
        self._unsharded_sums: dict[int, TreeSum] = {}  # position -> sum of the micro-batches so far
        self._trains = [parameter.sharded_param.requires_grad for parameter in group.fsdp_params]
        self._pre_forward_of_fsdp, self._post_backward_of_fsdp = group.pre_forward, group.post_backward
        group.pre_forward, group.post_backward = self._pre_forward, self._post_backward

    @property
    def used(self) -> frozenset[int]:
        """Positions in `parameters` of the parameters that had a gradient on this rank since `reset`."""
        return frozenset(self._used)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters of the group."""
        return [parameter.sharded_param for parameter in self._group.fsdp_params]

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The unsharded parameters, which are autograd's leaves. Empty before the first unshard."""
        return [each._unsharded_param for each in self._group.fsdp_params if hasattr(each, "_unsharded_param")]

    def only_zeros(self) -> list[nn.Parameter]:
        """Return the sharded parameters that this rank has not used since `reset`, and that were reduced as zeros."""
        if not self._completed:
            return []
        return [self._group.fsdp_params[index].sharded_param for index in self._completed - self._used]

    def use(self, parameter: nn.Parameter) -> None:
        """Count a sharded parameter of the group as used, after its gradient was set by hand."""
        places = (index for index, each in enumerate(self._group.fsdp_params) if each.sharded_param is parameter)
        self._used.update(places)

    @property
    def group_id(self) -> int:
        """The `id` of FSDP2's parameter group."""
        return id(self._group)

    def is_of(self, module: nn.Module) -> bool:
        """Return whether `module` itself, and not a module inside it, has the FSDP2 state of this group."""
        return isinstance(module, FSDPModule) and self._group in groups_of(module._get_fsdp_state())

    def reduce_once(self) -> None:
        """Reduce the group once per backward, however often its module runs: see [Note: Reducing once]. Call once."""
        register, self._reduces_once = self._group._register_post_backward_hook, True

        def register_first(args: Any, kwargs: Any) -> Any:
            return register(args, kwargs) if self._num_forwards == 1 and not is_in_backward() else (args, kwargs)

        self._group._register_post_backward_hook = register_first

    def add_in_tree_order(self) -> None:
        """Add unsharded gradients in tree order from now on: see [Note: Unsharded sums in the order of the tree]."""
        self._adds_in_tree_order = True

    def count_forward(self) -> None:
        """Count a use of the group's unsharded parameters outside of its modules' forwards. Call after unsharding."""
        if not torch.is_grad_enabled():
            return
        self._num_forwards += 1
        # From torch 2.15 on, autograd sums in fp32 unless FSDP2's pre-backward defers it. This use has no pre-backward.
        if hasattr(self._group, "_set_unsharded_grad_dtypes"):
            self._group._set_unsharded_grad_dtypes(defer_upcast=True)

    def end_backward(self) -> None:
        """Discard the count of forwards whose backward did not run. Call after each backward of the root."""
        self._num_forwards = 0

    def reset(self) -> None:
        """Begin the next optimizer step: clear `used`, and release all partial sums."""
        self._num_forwards, self._is_pending, self._awaits_replicas = 0, False, False
        self._of_all_replicas.clear()
        self._unsharded_sums.clear()
        self._used.clear()
        self._completed.clear()
        self._group._partial_reduce_output = None

    @property
    def _is_last_with_partial_sums(self) -> bool:
        if self._awaits_replicas:
            return self.sums_replicas
        return self._group._partial_reduce_output is not None and self._group.all_reduce_grads  # FSDP2's own

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
        for index, parameter in enumerate(self._group.fsdp_params):
            sharded = parameter.sharded_param
            partial_sums = None if self.take_sum is None else self.take_sum(sharded)
            if index not in self._in_reduction:
                if sharded.grad is not None or partial_sums is not None or index in self._of_all_replicas:
                    raise RuntimeError(
                        f"A parameter of shape {tuple(sharded.shape)} was frozen between two micro-batches of an "
                        "optimizer step. With replicas (HSDP) the sum of its gradients cannot be completed then. "
                        "Freeze it between two optimizer steps."
                    )
                continue
            shard = torch.as_strided(
                reduced, parameter.sharded_size, parameter.contiguous_sharded_stride, storage_offset=offset
            )
            if partial_sums is not None:
                for each in partial_sums.partial:
                    hold_for_current_stream(each)
                partial_sums.add_to(shard, self.micro_batch)
            if sharded.grad is not None:
                partial = sharded.grad.to_local()
                shard.add_(partial.to(reduced.device, non_blocking=True))
                hold_for_current_stream(partial)
                sharded.grad = None
            sharded.grad = self._of_all_replicas.pop(index, None)  # to which FSDP2 adds the result
            offset += _padded_shard_numel(parameter, self._group.mesh_info.shard_mesh_size)
        return True

    def _set_aside(self) -> None:
        """Move gradients of all replicas out of `parameter.grad`, if the step continues after its last reduction."""
        for index, parameter in enumerate(self._group.fsdp_params):
            if parameter.sharded_param.grad is not None:
                self._of_all_replicas[index] = parameter.sharded_param.grad
                parameter.sharded_param.grad = None

    def _pre_forward(self, *args: Any) -> Any:
        self._num_forwards += torch.is_grad_enabled()
        self._follow_requires_grad()
        return self._pre_forward_of_fsdp(*args)

    def _follow_requires_grad(self) -> None:
        """Copy a change of `requires_grad` between the sharded and the unsharded parameter.

        Between micro-batches at stages 0 to 2, `model.parameters()` yields unsharded parameters. FSDP2 copies the flag
        of the sharded one only.
        """
        for index, parameter in enumerate(self._group.fsdp_params):
            sharded, trained = parameter.sharded_param, self._trains[index]
            unsharded = getattr(parameter, "_unsharded_param", sharded)
            if sharded.requires_grad is not trained or unsharded.requires_grad is not trained:
                self._trains[index] = not trained
                for form in (sharded, unsharded):
                    form.requires_grad_(not trained)

    def _post_backward(self, *unused: Any) -> Any:
        group = self._group
        used, has_sums, lacks_gradient = [], False, False
        for index, parameter in enumerate(group.fsdp_params):  # one loop: this runs for each unit of each backward
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is None:
                return None  # the unit has never run. FSDP2's own post-backward would raise if it does not reduce
            if parameter.unsharded_accumulated_grad is not None:
                has_sums = True
                used.append(index)
            elif unsharded.grad is not None:
                used.append(index)
            elif unsharded.requires_grad:
                lacks_gradient = True
        ran = self._num_forwards > 0
        self._num_forwards = 0 if self._reduces_once else self._num_forwards - ran
        self._used.update(used)
        if not group.reduce_grads:
            self._is_pending |= ran or bool(used)
        elif ran or used or self._is_pending or self._is_last_with_partial_sums:
            self._is_pending = False
            if has_sums or lacks_gradient:  # otherwise all trained parameters have gradients, of one dtype
                self._completed.update(_complete(group.fsdp_params))
                used = [i for i, parameter in enumerate(group.fsdp_params) if _has_gradient(parameter)]
            self._in_reduction = used
        if not self._adds_in_tree_order:
            return self._post_backward_of_fsdp(*unused)
        if group.reduce_grads:
            self._add_unsharded_sums()
        result = self._post_backward_of_fsdp(*unused)
        if not group.reduce_grads:
            self._take_unsharded_gradients()
        return result

    def _take_unsharded_gradients(self) -> None:
        """Move the unsharded gradients of this micro-batch into the sums."""
        for index, parameter in enumerate(self._group.fsdp_params):
            if _has_gradient(parameter):
                gradient = _take_gradient(parameter)
                self._unsharded_sums.setdefault(index, TreeSum()).add(self.micro_batch, gradient)

    def _add_unsharded_sums(self) -> None:
        """Add the sums to the gradients of the last micro-batch, and cast all to fp32: FSDP2 reduces one dtype."""
        for index, parameter in enumerate(self._group.fsdp_params if self._unsharded_sums else ()):
            total = self._unsharded_sums.get(index)
            if _has_gradient(parameter):
                gradient = _take_gradient(parameter)
                if total is not None:
                    total.add_to(gradient, self.micro_batch)
            elif total is not None:
                gradient = total.total()
            else:
                continue
            if _autograd_sums(parameter):
                parameter._unsharded_param.grad_dtype = gradient.dtype
                parameter._unsharded_param.grad = gradient
            else:
                parameter.unsharded_accumulated_grad = gradient
        self._unsharded_sums.clear()
        self._in_reduction = [i for i, each in enumerate(self._group.fsdp_params) if _has_gradient(each)]


def follow_gradients(root: nn.Module) -> list[GroupGradients]:
    """Attach a `GroupGradients` to each parameter group of a root. Call once, after `fully_shard` of all units."""
    groups = {id(group): group for unit in units_of(root) for group in groups_of(unit._get_fsdp_state())}
    return [GroupGradients(group) for group in groups.values()]  # the modules of a merged unit share theirs


def by_module(gradients: list[GroupGradients], root: nn.Module) -> dict[nn.Module, GroupGradients]:
    """Return a dict from each module with a parameter group of its own to that group's `GroupGradients`."""
    by_group = {each.group_id: each for each in gradients}
    return {
        cast(nn.Module, unit): by_group[id(group)]
        for unit in units_of(root)
        for group in groups_of(unit._get_fsdp_state())
    }


def _has_gradient(parameter: Any) -> bool:
    """Return whether this rank has an unsharded gradient of a parameter, of this micro-batch or of an earlier one."""
    return parameter.unsharded_accumulated_grad is not None or parameter._unsharded_param.grad is not None


def _take_gradient(parameter: Any) -> torch.Tensor:
    """Remove the unsharded gradient of a parameter, and return it in fp32."""
    gradient: torch.Tensor | None = parameter.unsharded_accumulated_grad
    if gradient is None:
        gradient = cast(torch.Tensor, parameter._unsharded_param.grad)
    parameter._unsharded_param.grad = None
    if not _autograd_sums(parameter):
        parameter.unsharded_accumulated_grad = None
    return gradient.float()


def _complete(parameters: list[Any]) -> list[int]:
    """Give each trainable parameter a gradient, all in one dtype; return the positions of those that are zeros.

    See [Note: Zeros for unused parameters] and [Note: One dtype per reduction].
    """
    sums = (parameter.unsharded_accumulated_grad for parameter in parameters if not _autograd_sums(parameter))
    dtype = next((total.dtype for total in sums if total is not None), None)
    zeros = []
    for index, parameter in enumerate(parameters):
        unsharded = parameter._unsharded_param
        if _has_gradient(parameter):
            gradient = unsharded.grad
        elif unsharded.requires_grad:
            gradient = _zeros_like(unsharded, dtype or getattr(unsharded, "grad_dtype", None))
            zeros.append(index)
        else:
            continue
        if dtype is None:
            unsharded.grad = gradient
        elif parameter.unsharded_accumulated_grad is None:
            parameter.unsharded_accumulated_grad, unsharded.grad = gradient.to(dtype), None
    return zeros


def _zeros_like(unsharded: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return zeros of the shape of an unsharded parameter, in `dtype`, by default its own.

    torchao's float8 parameters have no `torch.zeros_like`.
    """
    if isinstance(unsharded, DTensor):
        return torch.zeros_like(unsharded, dtype=dtype)
    return torch.zeros(unsharded.shape, dtype=dtype or unsharded.dtype, device=unsharded.device)


def _autograd_sums(parameter: Any) -> bool:
    """Return whether autograd itself sums micro-batches, and `unsharded_accumulated_grad` reads that sum (2.15 on)."""
    return isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


def _padded_shard_numel(parameter: Any, num_shards: int) -> int:
    """Return the number of elements of one shard in the flat reduced gradients. Shards of dimension 0 are padded."""
    shape: torch.Size = parameter.sharded_param.shape
    if parameter.fsdp_placement.dim == 0:
        return -(-shape[0] // num_shards) * math.prod(shape[1:])
    return shape.numel() // num_shards
