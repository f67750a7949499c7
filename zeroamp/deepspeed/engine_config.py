"""`EngineConfig`: the methods of the engine that read the config."""

from collections.abc import Callable

import torch

from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.numbers import is_integer
from zeroamp.policies.policy import Policy


def micro_batch_size(policy: Policy) -> int:
    """Return the samples of a micro-batch.

    Raises:
        ConfigError: the config has no batch size.
    """
    if policy.train_micro_batch_size_per_gpu is None:
        raise ConfigError(
            "The config of initialize() must have train_batch_size or train_micro_batch_size_per_gpu, but has neither. "
            "Add one: the engine counts samples by it."
        )
    return policy.train_micro_batch_size_per_gpu


def _is_dynamic(policy: Policy) -> bool:
    return policy.low_dtype == torch.float16 and policy.loss_scale.dynamic


READERS: dict[str, Callable[[Policy], object]] = {
    "amp_enabled": lambda _: False,  # there is no Apex AMP
    "bfloat16_enabled": lambda policy: policy.mode == "bf16",
    "dynamic_loss_scale": _is_dynamic,
    "fp16_enabled": lambda policy: policy.mode == "fp16",
    "gradient_clipping": lambda policy: policy.gradient_clipping,
    "initial_dynamic_scale": lambda policy: policy.loss_scale.initial,
    "loss_scale": lambda policy: 0.0 if _is_dynamic(policy) else policy.loss_scale.initial,
    "optimizer_name": lambda policy: None if policy.optimizer is None else policy.optimizer.type.lower(),
    "scheduler_name": lambda policy: None if policy.scheduler is None else policy.scheduler.type,
    "steps_per_print": lambda policy: int(policy.steps_per_print),
    "torch_autocast_dtype": lambda policy: policy.low_dtype if policy.mode == "autocast" else None,
    "torch_autocast_enabled": lambda policy: policy.mode == "autocast",
    "wall_clock_breakdown": lambda _: False,  # a RunReport has the times
    "zero_cpu_offload": lambda policy: policy.offload.to_cpu,
    "zero_gather_16bit_weights_on_model_save": lambda policy: policy.gather_16bit_weights_on_save,
    "zero_optimization": lambda policy: policy.stage > 0,
    "zero_optimization_partition_gradients": lambda policy: policy.stage >= 2,
    "zero_optimization_partition_weights": lambda policy: policy.stage == 3,
    "zero_optimization_stage": lambda policy: policy.stage,
}
"""Method of the engine without arguments -> the value of the config that it returns."""


class EngineConfig:
    """The batch sizes of DeepSpeed's engine. Its `__getattr__` finds the methods of `READERS`."""

    def __init__(self, policy: Policy, num_ranks: int) -> None:
        self.policy = policy
        """The config as zeroamp's `Policy`."""
        self._micro_batch_size = micro_batch_size(policy)
        self._accumulation_steps = policy.gradient_accumulation_steps
        self._num_ranks = num_ranks

    # Batch sizes

    def train_batch_size(self) -> int:
        """Return the samples of an optimizer step: micro-batch size x accumulation steps x ranks."""
        return self._micro_batch_size * self._accumulation_steps * self._num_ranks

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch."""
        return self._micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of an optimizer step, which `backward` divides losses by."""
        return self._accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps."""
        return self.train_batch_size(), self._micro_batch_size, self._accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches of an optimizer step. Call it between two optimizer steps.

        Raises:
            ConfigError: the number is not a multiple of micro-batch size x ranks.
        """
        per_micro_step = self._micro_batch_size * self._num_ranks
        if not is_integer(train_batch_size, at_least=1) or train_batch_size % per_micro_step:
            valid = f"a multiple of {per_micro_step} = micro-batch size x ranks"
            raise ConfigError(describe("set_train_batch_size", repr(train_batch_size), valid, "Pass such a number."))
        self._accumulation_steps = train_batch_size // per_micro_step

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size, by which samples are counted. The accumulation steps do not change.

        Raises:
            ConfigError: the size is not an integer of 1 or more.
        """
        if not is_integer(micro_batch_size, at_least=1):
            valid = "an integer of 1 or more"
            raise ConfigError(describe("set_train_micro_batch_size", repr(micro_batch_size), valid, "Pass one."))
        self._micro_batch_size = micro_batch_size
