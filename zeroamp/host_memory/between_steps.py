"""The key `zeroamp.offload_between_steps`: optimizer state is in host memory between the updates.

[Note: An update in parts]
An element-wise optimizer updates a part of the parameters at a time: the state of the part is copied to the device, the
part is updated, and its state goes back. So never more than one part of the state is on the device, also in the first
step, which makes the state. The bits are those of one update. Other optimizers update all parameters at once.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakMethod

import torch

from zeroamp.hooks.tensors import tensors_in
from zeroamp.host_memory.storages import HostCopies, offloaders, restore
from zeroamp.optimizers.bf16_states import Bf16StatesAdamW
from zeroamp.planning.mesh import device_of, local_part
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Policy
from zeroamp.training.step import StepExtension, TrainStep, step_of
from zeroamp.training.update import OptimizerUpdate
from zeroamp.wrapping.optimizer_hooks import ELEMENTWISE, has_own_step, has_step_hooks
from zeroamp.wrapping.state import wrap_state

PART_BYTES = 256 * 2**20
"""Bytes of the shards of parameters that are updated together. Two fp32 moments of them take twice as many."""


class OffloadBetweenSteps(StepExtension):
    """Lets a `TrainStep`'s optimizers update in parts, whose state is in host memory before and after."""

    needs_train_step = 'offload_optimizer is "cpu" (or zeroamp.offload_between_steps is ["optimizer"])'

    def check_config(self, policy: Policy) -> None:
        """Raise ConfigError if the config offloads the state for good."""
        if policy.offload.to_cpu:
            raise ConfigError(
                'zeroamp.offload_between_steps is ["optimizer"], but zero_optimization.offload_param leaves the state '
                "on the CPU during the update too. Remove one of the two keys."
            )

    def attach_step(self, train: TrainStep) -> None:
        """Let the optimizers update in parts."""
        device = device_of(wrap_state(train.model).mesh)
        for update in step_of(train).updates:
            update.parts = _OffloadedState(update, device).parts


class _OffloadedState:
    """The state of one optimizer. Whoever reads it between two steps gets it back on the device."""

    def __init__(self, update: OptimizerUpdate, device: torch.device) -> None:
        self._optimizer, self._device = update.optimizer, device
        self._held: list[tuple[list[torch.Tensor], HostCopies]] = []
        """The parts whose state is in host memory. The copies of one that was restored are empty, until `_copied`."""
        self._optimizer.register_state_dict_pre_hook(self._restore)
        self._optimizer.register_load_state_dict_pre_hook(self._restore)
        offloaders[self._optimizer] = WeakMethod(self.offload)

    def parts(self) -> Iterator[AbstractContextManager[None]]:
        """Yield a context for the update of each part."""
        parts = parts_of(self._optimizer)
        if _ids(parts) != _ids(part for part, _ in self._held):  # of the first update, or of other parameters
            self._restore()
            self.offload()
        for index, part in enumerate(parts):
            yield self._on_device(index, part)

    @contextmanager
    def _on_device(self, index: int, part: list[torch.Tensor]) -> Iterator[None]:
        self._held[index][1].restore()
        with limited_to(self._optimizer, part):
            yield
        self._held[index] = part, self._copied(part)

    def offload(self) -> None:
        """Move the state that is on the device to host memory."""
        for part in parts_of(self._optimizer)[len(self._held) :]:
            self._held.append((part, self._copied(part)))

    def _copied(self, part: list[torch.Tensor]) -> HostCopies:
        ids = set(map(id, part))
        state = [value for key, value in self._optimizer.state.items() if id(key) in ids]
        copies = HostCopies(tensors_in(state), self._device)
        copies.free()
        return copies

    def _restore(self, *_hook_arguments: object) -> None:
        restore([copies for _, copies in self._held])
        self._held = []


def _ids(parts: Iterable[list[torch.Tensor]]) -> list[list[int]]:
    return [list(map(id, part)) for part in parts]


def parts_of(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """Return the parameters of an optimizer in the parts in which it updates them: see [Note: An update in parts].

    A part has shards of at most `PART_BYTES`; a larger shard is a part of its own. An optimizer with step hooks has one
    part, because the hooks run with each `step`.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_elementwise = type(optimizer) in (*ELEMENTWISE, Bf16StatesAdamW)
    if not is_elementwise or has_own_step(optimizer) or has_step_hooks(optimizer):
        return [parameters]
    parts: list[list[torch.Tensor]] = [[]]
    num_bytes = 0
    for parameter in parameters:
        with torch.no_grad():
            size = local_part(parameter).nbytes
        if parts[-1] and num_bytes + size > PART_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(parameter)
        num_bytes += size
    return parts


@contextmanager
def limited_to(optimizer: torch.optim.Optimizer, part: list[torch.Tensor]) -> Iterator[None]:
    """Leave only the parameters of `part` in the optimizer's param groups inside the context."""
    own, ids = [group["params"] for group in optimizer.param_groups], set(map(id, part))
    try:
        for group, params in zip(optimizer.param_groups, own, strict=True):
            group["params"] = [each for each in params if id(each) in ids]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, own, strict=True):
            group["params"] = params
