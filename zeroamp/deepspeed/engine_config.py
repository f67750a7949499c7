"""`EngineConfig`: the methods of the engine that read the config."""

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


class EngineConfig:
    """The methods of DeepSpeed's engine that return values of the config."""

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

    # Stage and sharding

    def zero_optimization(self) -> bool:
        """Return whether the stage is above 0."""
        return self.policy.stage > 0

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self.policy.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether the stage shards gradients: 2 and 3."""
        return self.policy.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether the stage shards parameters between forward and backward: 3."""
        return self.policy.stage == 3

    def zero_cpu_offload(self) -> bool:
        """Return whether shards, gradients and optimizer state are on the CPU."""
        return self.policy.offload.to_cpu

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return the key `stage3_gather_16bit_weights_on_model_save`. `save_16bit_model` works without it too."""
        return self.policy.gather_16bit_weights_on_save

    # Precision

    def bfloat16_enabled(self) -> bool:
        """Return whether the mode is bf16."""
        return self.policy.mode == "bf16"

    def fp16_enabled(self) -> bool:
        """Return whether the mode is fp16."""
        return self.policy.mode == "fp16"

    def torch_autocast_enabled(self) -> bool:
        """Return whether the forward runs under torch.autocast."""
        return self.policy.mode == "autocast"

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the low precision of autocast; None in other modes."""
        return self.policy.low_dtype if self.policy.mode == "autocast" else None

    def amp_enabled(self) -> bool:
        """Return False: there is no Apex AMP."""
        return False

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        return self.policy.low_dtype == torch.float16 and self.policy.loss_scale.dynamic

    def initial_dynamic_scale(self) -> float:
        """Return the initial loss scale."""
        return self.policy.loss_scale.initial

    def loss_scale(self) -> float:
        """Return the static loss scale of the config; 0 if it is dynamic, 1 without float16."""
        return 0.0 if self.dynamic_loss_scale() else self.policy.loss_scale.initial

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients of low-precision parameters are sent."""
        return self.policy.communication_dtype

    # Step

    def gradient_clipping(self) -> float:
        """Return the largest gradient norm; 0 does not clip."""
        return self.policy.gradient_clipping

    def steps_per_print(self) -> int:
        """Return the optimizer steps between two log lines; 0: none."""
        return int(self.policy.steps_per_print)

    def wall_clock_breakdown(self) -> bool:
        """Return whether the phases of a step are timed."""
        return self.policy.wall_clock_breakdown

    def optimizer_name(self) -> str | None:
        """Return the type in the config's `optimizer` block."""
        return None if self.policy.optimizer is None else self.policy.optimizer.type.lower()

    def scheduler_name(self) -> str | None:
        """Return the type in the config's `scheduler` block."""
        return None if self.policy.scheduler is None else self.policy.scheduler.type
