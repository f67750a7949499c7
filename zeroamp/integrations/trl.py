"""TRL: its SFT, DPO, KTO and reward trainers on zeroamp. Tested with trl 1.16.0, transformers 5.24.0 and peft 0.21.2.

[Note: The head outside of its module]
Most trainers of TRL replace `model.forward`: a call with `fused_lm_head=True` computes log-probabilities of chunks from
`lm_head.weight`, outside of the `nn.Linear` that owns it, and adds their gradients in fp32. By its class the weight
counts as safe. All-gathering and reducing it in low precision would give other bits than plain autocast. A traced run
of the call in `compute_loss` detects this, so `"lower_precision_safe_modules": "auto"` is the default here. The weight
must be unsharded during the whole forward, so `"own_units": false` is the default too.

The run cannot be traced if the trainer generates the completions, or if Liger's kernels are in the model: they need the
memory of real tensors. Then an override keeps the head in fp32. With Liger the other parameters go by their class.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from zeroamp.hooks.random_state import preserved_random_state
from zeroamp.host_memory.activations import save_on_cpu
from zeroamp.integrations.peft import iter_merged_weights
from zeroamp.integrations.transformers import ZeroampArguments
from zeroamp.integrations.transformers import ZeroampMixin as ZeroampTrainerMixin
from zeroamp.integrations.transformers.arguments import with_head_in_fp32
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Policy
from zeroamp.weights.stream import iter_weights
from zeroamp.wrapping.state import wrap_state


class ZeroampMixin(ZeroampTrainerMixin):
    """Wraps the model of a TRL trainer: `class MyTrainer(ZeroampMixin, SFTTrainer)`. Put it before the trainer.

    See `zeroamp.integrations.transformers.ZeroampMixin`. Here `lower_precision_safe_modules` is "auto" if the config
    does not set it, and the example inputs are the arguments with which `compute_loss` calls the model for the first
    batch. A `ref_model` is frozen, sharded like the model, and evaluated under the same autocast.
    """

    is_for_trl = True

    @property
    def maybe_activation_offload_context(self) -> AbstractContextManager[Any]:
        """The context of each forward: `zeroamp.save_on_cpu` with `activation_offloading`.

        TRL's own context, which it assigns here, would copy the unsharded weights of each unit to the CPU too.
        """
        if not self.args.activation_offloading:
            return nullcontext()
        return save_on_cpu(pin_memory=self.args.device.type != "cpu", device_type=self.args.device.type)

    @maybe_activation_offload_context.setter
    def maybe_activation_offload_context(self, context: object) -> None:
        del context

    @property
    def vllm_generation(self) -> Any:
        """TRL's `VLLMGeneration`, which gets the weights by `zeroamp.iter_weights`, or merged if there are adapters."""
        return self._vllm_generation

    @vllm_generation.setter
    def vllm_generation(self, generation: Any) -> None:
        # TRL's own reads `named_parameters()` of the model, which are shards here.
        generation._iter_named_params = self._iter_vllm_weights
        self._vllm_generation = generation

    def _iter_vllm_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.wrap()
        dtype = wrap_state(self.model).plan.policy.low_dtype or torch.float32
        return (iter_merged_weights if hasattr(self.model, "peft_config") else iter_weights)(self.model, dtype)

    def filled_config(self, model: nn.Module | None) -> dict[str, Any]:
        """Return the config with its "auto" values filled. See [Note: The head outside of its module]."""
        filled = super().filled_config(model)
        filled["zeroamp"] = {"own_units": False} | filled.get("zeroamp", {})
        autocast = filled.get("torch_autocast", {})
        uses_liger = bool(self.args.use_liger_kernel)
        if autocast.get("enabled") and not uses_liger:
            filled["torch_autocast"] = autocast = {"lower_precision_safe_modules": "auto"} | autocast
        generates = hasattr(self, "reward_funcs") and autocast.get("lower_precision_safe_modules") == "auto"
        return with_head_in_fp32(filled, model) if generates or uses_liger else filled

    def prepare_wrap(self, model: nn.Module, policy: Policy) -> dict[str, Any]:
        """Freeze a reference model, so that its shards keep their dtype. Returns more arguments of `wrap_model`."""
        if model is not self.model:
            model.requires_grad_(False)
        return super().prepare_wrap(model, policy)

    def example_inputs(self) -> dict[str, Any] | None:
        """Return the arguments with which `compute_loss` calls the model for the first batch.

        None for trainers that generate the completions: the traced run then uses the model's dummy inputs, and an
        override keeps the head in fp32.
        """
        examples: Iterable[Any] = self.train_dataset
        with preserved_random_state(self.args.device.type):
            collate = self._get_collator_with_removed_columns(self.data_collator)
            batch = collate(list(islice(examples, self._train_batch_size)))
            if not isinstance(batch, Mapping):  # prompts, with which the trainer generates
                return None
            try:
                self.compute_loss(_Recorder(self.model), dict(batch))
            except _FirstCall as call:
                return call.arguments
        raise ConfigError(
            f"compute_loss of {type(self).__name__} must call its argument model with keyword arguments, but did not. "
            'lower_precision_safe_modules "auto" needs the arguments of this call. Call model(**inputs), or list '
            "classes in lower_precision_safe_modules."
        )

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Wrap the model, then compute the reference log-probabilities of a batch. It may run before the training."""
        if self.ref_model is None:
            self.wrap()
        return super().compute_ref_log_probs(model, inputs)


class _FirstCall(Exception):  # noqa: N818
    """Raised by a `_Recorder` to leave `compute_loss`. It is not an error."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class _Recorder:
    """Replaces the model in `compute_loss`, and raises `_FirstCall` with the arguments of its first call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **arguments: Any) -> None:
        raise _FirstCall(arguments)


class ZeroampSFTTrainer(ZeroampMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's `SFTTrainer` on zeroamp."""


class ZeroampDPOTrainer(ZeroampMixin, DPOTrainer):  # type: ignore[misc]
    """TRL's `DPOTrainer` on zeroamp."""


@dataclass
class ZeroampSFTConfig(ZeroampArguments, SFTConfig):  # type: ignore[misc]
    """TRL's `SFTConfig` with the field `zeroamp`."""


@dataclass
class ZeroampDPOConfig(ZeroampArguments, DPOConfig):  # type: ignore[misc]
    """TRL's `DPOConfig` with the field `zeroamp`."""
