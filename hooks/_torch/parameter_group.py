"""One parameter group of FSDP2 (`FSDPParamGroup`) and its parameters (`FSDPParam`), for what follows their gradients.

FSDP2 has no public hook between the last gradient of a group and its reduction, nor one before a group is unsharded for
a forward. So `ParameterGroup.replace` puts a function in the place of a method, on the instance.

Checked on torch 2.11.0, 2.13.0 and 2.15.0; `tests/hooks/_torch/test_private_names.py` fails when a name is gone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal
from weakref import ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from zeroamp.hooks._torch.fsdp import groups_of, release_group, units_of

Method = Literal["pre_forward", "post_forward", "post_backward", "unshard"]
"""`pre_forward` unshards a group before a forward, and `post_forward` reshards it after the forward. `post_backward`
ends the group's backward and reduces its gradients. `unshard` starts an all-gather, also before a backward."""


Registration = tuple[dict[str, nn.Parameter | None], str, str]
"""The parameters of a module, the name of one of them, and its FQN."""


class GroupParameter:
    """One parameter of a group: sharded, unsharded, and its unsharded gradient."""

    def __init__(self, fsdp_param: Any) -> None:
        self._param = fsdp_param
        self.autograd_sums = isinstance(getattr(type(fsdp_param), "unsharded_accumulated_grad", None), property)
        """Whether autograd itself sums micro-batches (torch 2.15 on). Before, FSDP2 sums in a tensor of its own."""

    @property
    def sharded(self) -> nn.Parameter:
        """The sharded parameter. FSDP2 may replace it when the module moves."""
        parameter: nn.Parameter = self._param.sharded_param
        return parameter

    @property
    def unsharded(self) -> nn.Parameter | None:
        """The unsharded parameter, autograd's leaf; None before the first unshard."""
        return getattr(self._param, "unsharded_param", None)

    @property
    def own_sum(self) -> torch.Tensor | None:
        """FSDP2's sum of earlier micro-batches in the accumulation dtype; None if autograd sums."""
        return None if self.autograd_sums else self._param.unsharded_accumulated_grad

    @property
    def has_gradient(self) -> bool:
        """Whether this rank has an unsharded gradient, of this micro-batch or of an earlier one."""
        return self._param.unsharded_accumulated_grad is not None or self._param.unsharded_param.grad is not None

    def set_sum(self, total: torch.Tensor) -> None:
        """Set the unsharded gradient to a sum, which may have another dtype than the parameter."""
        if self.autograd_sums:
            self._param.unsharded_param.grad = None  # while it has a gradient, `grad_dtype` cannot change
            self._param.unsharded_param.grad_dtype = total.dtype
            self._param.unsharded_param.grad = total
        else:
            self._param.unsharded_accumulated_grad, self._param.unsharded_param.grad = total, None

    def sum_gradient(self) -> None:
        """Add the gradient of the last backward to the sum in the accumulation dtype, as FSDP2 does after backwards.

        Does nothing if the gradient has that dtype, or if autograd sums.
        """
        unsharded, total = self.unsharded, self.own_sum
        if self.autograd_sums or unsharded is None or unsharded.grad is None:
            return
        if total is not None:
            total += unsharded.grad
            unsharded.grad = None
        elif (dtype := self._param.reduce_dtype) is not None and unsharded.grad.dtype != dtype:
            self.set_sum(unsharded.grad.to(dtype))

    def shard_of(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the view of this rank's shard of the gradient, which begins at `offset` of a flat reduced shard."""
        size, stride = self._param.sharded_size, self._param.contiguous_sharded_stride
        return torch.as_strided(flat, size, stride, storage_offset=offset)

    def padded_shard_numel(self, num_shards: int) -> int:
        """Return the number of elements of a shard in the flat reduced gradients. Shards of dimension 0 are padded."""
        shape: torch.Size = self.sharded.shape
        if self._param.fsdp_placement.dim == 0:
            return -(-shape[0] // num_shards) * math.prod(shape[1:])
        return shape.numel() // num_shards


class ParameterGroup:
    """One parameter group. The modules of a unit that has several share it."""

    def __init__(self, group: Any) -> None:
        self.fsdp_group = group
        self.places: list[Registration] = []
        """Where the model has each parameter. Set it before the first forward."""
        self.parameters = [GroupParameter(each) for each in group.fsdp_params]
        self._first_data: tuple[ref[torch.Tensor], StorageWeakRef] | None = None
        self._trains = [each.sharded.requires_grad for each in self.parameters]
        self.ignored_data()

    @property
    def reduces(self) -> bool:
        """Whether the next `post_backward` reduces the gradients."""
        return bool(self.fsdp_group.reduce_grads)

    @property
    def num_shards(self) -> int:
        """The number of ranks that share the parameters."""
        return int(self.fsdp_group.mesh_info.shard_mesh_size)

    @property
    def sums_replicas(self) -> bool:
        """Whether the next reduction is also summed over replicas: the flag of `set_requires_all_reduce`."""
        return bool(self.fsdp_group.all_reduce_grads)

    @property
    def has_replica_sums(self) -> bool:
        """Whether FSDP2 has sums that are not summed over replicas yet."""
        return self.fsdp_group._partial_reduce_output is not None

    def replace(self, method: Method, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make FSDP2 call `function` instead of a method of this group, and return what it called before."""
        before: Callable[..., Any] = getattr(self.fsdp_group, method)
        setattr(self.fsdp_group, method, function)
        return before

    def end_backward_if(self, ends_backward: Callable[[], bool]) -> None:
        """Let a forward end the group's backward, and reduce its gradients, only if `ends_backward` returns True.

        By default each forward of the group does so. FSDP2 asks at the beginning of each forward with gradients.
        """
        register = self.fsdp_group._register_post_backward_hook

        def register_if(args: Any, kwargs: Any) -> Any:
            return register(args, kwargs) if ends_backward() else (args, kwargs)

        self.fsdp_group._register_post_backward_hook = register_if

    def end_backward(self) -> None:
        """End the group's backward, and reduce its gradients, as FSDP2 does at the end of the whole backward."""
        self.fsdp_group.post_backward()

    def reshard_in_backward(self) -> None:
        """Reshard the group after the backward of one of several runs, unless it stays unsharded after backwards.

        The next run unshards it again. If there is none, FSDP2 calls `post_backward` at the end of the whole backward.
        """
        if self.fsdp_group.reshard_after_backward:
            self.fsdp_group.reshard()
        self.fsdp_group._training_state = type(self.fsdp_group._training_state).IDLE

    def lacks_new_gradient(self, *, has_sums: bool) -> bool:
        """Return whether a trainable parameter has no gradient of this micro-batch yet, or may have none.

        `has_sums`: whether there may be gradients of earlier micro-batches. Where these are in `grad` too, a new
        gradient cannot be told from them; True is returned then.
        """
        for parameter in self.parameters:
            unsharded = parameter.unsharded
            if unsharded is None or not unsharded.requires_grad:
                continue
            if unsharded.grad is None or (has_sums and parameter.own_sum is None):
                return True
        return False

    def follow_changes(self) -> str:
        """Copy a change of `requires_grad` between the sharded and the unsharded parameters.

        Return the FQN of a parameter in whose place its module has another tensor, which FSDP2 would overwrite; "" if
        there is none.

        Between micro-batches at stages 0 to 2, `model.parameters()` yields unsharded parameters. FSDP2 copies the flag
        of the sharded one only.
        """
        for index, parameter in enumerate(self.fsdp_group.fsdp_params):  # for each forward of each unit
            sharded, trained = parameter.sharded_param, self._trains[index]
            unsharded = getattr(parameter, "unsharded_param", sharded)
            owned, name, fqn = self.places[index]
            if (value := owned.get(name)) is not sharded and value is not unsharded:
                return fqn
            if sharded.requires_grad is not trained or unsharded.requires_grad is not trained:
                self._trains[index] = not trained
                for form in (sharded, unsharded):
                    form.requires_grad_(not trained)
        return ""

    def replaced(self) -> str:
        """Return the FQN of a parameter that was replaced by an object that FSDP2 cannot use; "" if there is none.

        Until its first forward, FSDP2 accepts another sharded `nn.Parameter`, as `load_state_dict(assign=True)` sets
        it. FSDP2 would also accept the sharded tensor that `torch.func.functional_call` sets for one call.
        """
        for parameter, (owned, name, fqn) in zip(self.fsdp_group.fsdp_params, self.places, strict=True):
            value: Any = owned.get(name)
            if value is not parameter.sharded_param and value is not getattr(parameter, "unsharded_param", parameter):
                is_usable = isinstance(value, nn.Parameter) and isinstance(value, DTensor)
                if not is_usable or hasattr(parameter, "unsharded_param"):
                    return fqn
        return ""

    def ignored_data(self) -> str:
        """Return the FQN of the group's first trained parameter if its `data` was set to another tensor, else "".

        Setting `data` of a DTensor changes only the DTensor's own storage, which is empty, and not its local tensor.
        One parameter is checked, because code that sets `data` does so for all parameters. `Module.to` also replaces
        the local tensor, and is not reported.
        """
        index = self._trains.index(True) if True in self._trains else 0
        sharded = self.fsdp_group.fsdp_params[index].sharded_param
        with torch._C.DisableTorchFunction():  # a mode of the caller may show another tensor
            local, storage = sharded._local_tensor, StorageWeakRef(sharded.untyped_storage())  # type: ignore[no-untyped-call]
        known, self._first_data = self._first_data, (ref(local), storage)
        if known is None or known[0]() is not local or known[1].cdata == storage.cdata:
            return ""
        return self.places[index][2]

    def unsharded_gradients(self) -> tuple[list[int], bool, bool] | None:
        """Return which parameters have an unsharded gradient: their positions, and two flags.

        The first flag is whether one of these gradients is FSDP2's sum of earlier micro-batches, in the accumulation
        dtype. The second is whether a trainable parameter has none. None if the group was never unsharded.
        """
        used, has_sums, lacks_gradient = [], False, False
        for index, parameter in enumerate(
            self.fsdp_group.fsdp_params
        ):  # one loop: it runs for each unit of each backward
            unsharded = getattr(parameter, "unsharded_param", None)
            if unsharded is None:
                return None
            gradient, total = unsharded.grad, parameter.unsharded_accumulated_grad
            if total is not None and total is not gradient:  # from torch 2.15 on it is autograd's gradient
                has_sums = True
                used.append(index)
            elif gradient is not None:
                used.append(index)
            elif unsharded.requires_grad:
                lacks_gradient = True
        return used, has_sums, lacks_gradient


def in_backward(groups: Sequence[ParameterGroup]) -> list[int]:
    """Return the positions of the groups whose part of the running backward FSDP2 has not ended."""
    states = [each.fsdp_group._training_state for each in groups]
    return [index for index, state in enumerate(states) if state is not type(state).POST_BACKWARD]


def discard_replica_sums(groups: Iterable[ParameterGroup]) -> None:
    """Discard FSDP2's sums that are not summed over replicas yet."""
    for each in groups:
        each.fsdp_group._partial_reduce_output = None


def release_groups(groups: Iterable[ParameterGroup]) -> None:
    """Reshard groups, in whatever state the last forward left them."""
    for each in groups:
        release_group(each.fsdp_group)


def unshard_before_backward_of(
    tensors: Iterable[torch.Tensor], module: FSDPModule, awaits_backward: Callable[[], bool]
) -> None:
    """Unshard `module`'s own groups before the backward of these tensors, as FSDP2 does for the outputs of a forward.

    An op in place on a view discards the hooks on the view (pytorch issue 181832). So for a view, the autograd node of
    its base gets the hook. This hook does nothing if `awaits_backward()` is False, because the base may be older than
    the forward.
    """
    pre_backward: Callable[[Any], Any] = module._get_fsdp_state()._pre_backward

    def before_base(_gradients: Any) -> None:
        if awaits_backward():
            pre_backward(None)

    for tensor in tensors:
        if tensor._base is None or tensor._base.grad_fn is None:
            tensor.register_hook(pre_backward)  # type: ignore[no-untyped-call]
        else:
            tensor._base.grad_fn.register_prehook(before_base)


def parameter_groups(root: nn.Module) -> Iterator[tuple[ParameterGroup, FSDPModule]]:
    """Yield each parameter group of the modules of `root`, and its module."""
    for unit in units_of(root):
        yield from ((ParameterGroup(group), unit) for group in groups_of(unit._get_fsdp_state()))
