"""The key `zeroamp.offload_between_steps`: optimizer state is in host memory, except during the update."""

import torch

from zeroamp.hooks.tensors import tensors_in
from zeroamp.host_memory.storages import HostCopies
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.extensions import Extension
from zeroamp.policies.policy import Policy
from zeroamp.training.callbacks import Callback
from zeroamp.training.step import TrainStep
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import wrap_state


class OffloadBetweenSteps(Extension):
    """Moves the state of a `TrainStep`'s optimizers to host memory after each update, and back before the next one."""

    needs_train_step = 'zeroamp.offload_between_steps is ["optimizer"]'

    def check_config(self, policy: Policy) -> None:
        """Raise ConfigError if the config offloads the state for good."""
        if policy.offload.to_cpu:
            raise ConfigError(
                'zeroamp.offload_between_steps is ["optimizer"], but zero_optimization.offload_optimizer leaves the '
                "state on the CPU during the update too. Remove one of the two keys."
            )

    def attach_step(self, train: TrainStep) -> None:
        """Append the callback that moves the state."""
        device = device_of(wrap_state(train.model).mesh)
        train.callbacks.extend(_OffloadedState(optimizer, device) for optimizer in train.optimizers)


class _OffloadedState(Callback):
    """Moves the state of one optimizer. Whoever reads the state between two steps gets it back on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._copies: HostCopies | None = None
        optimizer.register_state_dict_pre_hook(self._restore)
        optimizer.register_load_state_dict_pre_hook(self._restore)

    def before_update(self) -> None:
        """Bring the state to the device."""
        self._restore()

    def on_step_end(self, report: StepReport, /) -> None:
        """Move the state to host memory."""
        del report
        if self._copies is None:
            self._copies = HostCopies(tensors_in(self._optimizer.state), self._device)

    def _restore(self, *_hook_arguments: object) -> None:
        if self._copies is not None:
            self._copies.restore()
            self._copies = None
