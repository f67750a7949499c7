"""`ZeroampMixin`: runs any subclass of transformers' Trainer on zeroamp."""

import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers.trainer
from accelerate.utils import is_peft_model
from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, TrainOutput

from zeroamp.checkpoint.load import load_checkpoint
from zeroamp.checkpoint.save import save_checkpoint
from zeroamp.hooks.random_state import preserved_random_state
from zeroamp.integrations.accelerate import ZeroampAccelerator
from zeroamp.integrations.peft import export_adapter, load_adapter
from zeroamp.integrations.transformers.arguments import REFUSED, fill_auto, refuse_arguments, with_head_in_fp32
from zeroamp.optimizers.from_config import optimizer_from_config
from zeroamp.optimizers.schedulers import scheduler_from_config
from zeroamp.policies.auto_values import without_open_keys
from zeroamp.policies.auto_wrap import find_units
from zeroamp.policies.errors import CheckpointError, ConfigError, WrapError
from zeroamp.policies.policy import ConfigLike, Policy, policy_from_config
from zeroamp.rank_group import RankGroup
from zeroamp.training.step import TrainStep
from zeroamp.weights.export import export_hf
from zeroamp.weights.files import ADAPTER_STEM, INDEX, SINGLE_FILE
from zeroamp.weights.load import load_hf
from zeroamp.wrapping.state import wrap_state

_Trainer: Any = Trainer if TYPE_CHECKING else object

logger = logging.getLogger("zeroamp")
_STATE = "zeroamp"
"""The folder of `zeroamp.save_checkpoint` inside a Trainer's checkpoint."""


class ZeroampMixin(_Trainer):  # type: ignore[misc]
    """Trains a Trainer's model with zeroamp: `class MyTrainer(ZeroampMixin, SFTTrainer)`. Put it before the Trainer.

    The config is `zeroamp` in the training arguments (`ZeroampTrainingArguments`) or in the constructor. `fill_auto`
    fills its "auto" values. The first `train`, `evaluate` or `predict` wraps the model, because Trainer subclasses may
    replace its `forward` after `Trainer.__init__`. All ranks must call `save_model`.
    """

    refused_arguments: Mapping[str, str] = REFUSED
    """Argument -> why it is refused if it is set."""
    is_for_trl = False
    """Whether the trainer may be one of TRL."""

    def __init__(self, *args: Any, zeroamp: ConfigLike | None = None, **kwargs: Any) -> None:
        """Construct the Trainer.

        Args:
            args: of the Trainer.
            zeroamp: the config, if the training arguments do not have it: the path of a JSON file, or a mapping.
            kwargs: of the Trainer.

        Raises:
            ConfigError: there is no config, or an argument is set that a wrapped model cannot honour.
            ImportError: transformers is older than 5.3.
            WrapError: the model is spread over devices.
        """
        if "model" not in inspect.signature(Trainer.create_optimizer).parameters:  # since 5.3
            raise ImportError(
                f"{type(self).__name__} needs transformers 5.3 or newer, but {transformers.__version__} is installed. "
                "Run: pip install 'zeroamp[transformers]'"
            )
        if not self.is_for_trl and any(cls.__module__.startswith("trl.") for cls in type(self).__mro__):
            raise ConfigError(
                f"{type(self).__name__} is a trainer of TRL, which reads weights outside of their modules. Put "
                "zeroamp.integrations.trl.ZeroampMixin before it instead."
            )
        self._zeroamp_config = zeroamp
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self._max_steps: int | None = None
        super().__init__(*args, **kwargs)
        if len(set((getattr(self.model, "hf_device_map", None) or {}).values())) > 1:
            raise WrapError("The model was spread over devices (device_map). Load it without device_map.")

    def _config(self) -> ConfigLike:
        of_args: ConfigLike | None = getattr(self.args, "zeroamp", None)
        if of_args is not None and self._zeroamp_config is not None:
            raise ConfigError("zeroamp is given twice, in the arguments and to the Trainer. Remove one of them.")
        found = self._zeroamp_config if of_args is None else of_args
        if found is None:
            raise ConfigError(
                f"{type(self).__name__} has no zeroamp config. Pass "
                'ZeroampTrainingArguments(zeroamp="config.json"), or zeroamp="config.json" to the Trainer.'
            )
        return found

    # ---- the accelerator: backward, norm and update

    def create_accelerator_and_postprocess(self) -> None:
        """Build the accelerator whose backward, norm and update are those of `TrainStep`."""
        refuse_arguments(self.args, self.refused_arguments)
        with _accelerator_class(partial(TrainerAccelerator, self)):
            super().create_accelerator_and_postprocess()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        # The config decides the precision, and `prepare_wrap` compiles units before they are wrapped.
        return {name: value for name, value in built.items() if name not in ("mixed_precision", "dynamo_plugin")}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `wrap_model` moves each unit's shard, so that no device holds the whole model."""

    @property
    def train_step(self) -> TrainStep:
        """The `TrainStep` of the model and the optimizer. It exists once the training has begun."""
        step: TrainStep = self.accelerator.train_step
        return step

    # ---- wrapping

    def wrap(self) -> Policy:
        """Wrap the model if it is not wrapped yet, and return its policy."""
        self.accelerator.prepare_model(self.model)
        return wrap_state(self.model).plan.policy

    def policy_of(self, model: nn.Module | None) -> Policy:
        """Return the policy for a model, with every "auto" of the config filled. None: those that need no model."""
        filled = self.filled_config(model)
        policy = policy_from_config(without_open_keys(filled) if model is None else filled)
        if policy.reduce == "sum":
            raise ConfigError(
                'zeroamp.reduce is "sum", but a Trainer needs gradients that are averaged over ranks. Leave it out.'
            )
        return policy

    def filled_config(self, model: nn.Module | None) -> dict[str, Any]:
        """Return the config with its "auto" values filled from the arguments, and from a model if there is one."""
        num_steps = None if model is None else self._num_training_steps()
        filled = fill_auto(self._config(), self.args, model, num_steps)
        policy_from_config(without_open_keys(filled))  # an error in the config comes before code that reads its blocks
        # Liger's fused cross entropy reads the head's weight outside of its module. It is on unless it is switched off.
        kernels = {"fused_linear_cross_entropy": True} | (self.args.liger_kernel_config or {})
        reads_head = self.args.use_liger_kernel and kernels["fused_linear_cross_entropy"]
        return with_head_in_fp32(filled, model) if reads_head else filled

    def prepare_wrap(self, model: nn.Module, policy: Policy) -> dict[str, Any]:
        """Compile the units of a model. Returns more arguments of `wrap_model`."""
        if self.args.torch_compile:  # each FSDP unit alone: a graph of the whole model would break at each unit's hooks
            for fqn in find_units(model, leaf_modules=policy.leaf_modules):
                unit = model.get_submodule(fqn)
                unit.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
        # fully_shard changes the class. The Trainer selects the loss by its name (label smoothing).
        model._get_name = partial(str, type(model).__name__)  # type: ignore[method-assign]
        # Only a config with a traced run needs example inputs.
        is_traced = policy.lower_precision_safe_modules == "auto"
        return {"example_inputs": self.example_inputs() if is_traced else None}

    def _num_training_steps(self) -> int:
        """Return the optimizer steps of the run, for the config's `scheduler`."""
        if self._max_steps is not None:
            return self._max_steps
        if self.args.max_steps > 0 or self.train_dataset is None:
            return int(max(1, self.args.max_steps))
        with preserved_random_state(self.args.device.type):  # needed only by an evaluation before the training
            return int(self.set_initial_training_values(self.args, self.get_train_dataloader())[-1])

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        self._max_steps = max_steps
        return super()._prepare_for_training(max_steps, *args, **kwargs)

    def example_inputs(self) -> Any:
        """Return the collated first examples, for a traced run of the model. None: the model's dummy inputs."""
        dataset = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        if not hasattr(dataset, "__getitem__") or isinstance(dataset, dict):
            return None
        with preserved_random_state(self.args.device.type):
            collate = self._get_collator_with_removed_columns(self.data_collator)
            return dict(collate([dataset[index] for index in range(min(len(dataset), self._train_batch_size))]))

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Wrap the model, then build the optimizer of its shards: the config's if it has one, else the Trainer's."""
        policy = self.wrap()
        if policy.optimizer is None:
            return super().create_optimizer(model)
        if self.optimizer is None:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = optimizer_from_config(policy, trained)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return the config's scheduler if it has one, else the Trainer's."""
        policy = wrap_state(self.model).plan.policy
        if policy.scheduler is not None and self.lr_scheduler is None:
            self.lr_scheduler = scheduler_from_config(policy, self.optimizer if optimizer is None else optimizer)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Wrap the model, then evaluate as the Trainer does."""
        self.wrap()
        return super().evaluation_loop(*args, **kwargs)

    # ---- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights for `from_pretrained`, with the tokenizer and the arguments. All ranks call it."""
        folder = self.args.output_dir if output_dir is None else output_dir
        self.wrap()
        self._export(folder)
        if self.args.should_save:
            self._save_beside(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _export(self, folder: str) -> None:
        """Write the adapters of a model with adapters, as `PeftModel.save_pretrained` does, else the whole model."""
        if not is_peft_model(self.model):
            export_hf(self.model, folder)
            return
        for name in self.model.peft_config:
            export_adapter(self.model, folder, name)

    def _save_beside(self, folder: str) -> None:
        """Write the tokenizer and the training arguments beside the weights, on one rank."""
        collator = getattr(self.data_collator, "tokenizer", None)
        processing = self.processing_class if self.processing_class is not None else collator
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save `checkpoint-N`. It is complete once it has the Trainer's state, which is removed first, written last."""
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self._ranks().on_first(lambda: (folder / TRAINER_STATE_NAME).unlink(missing_ok=True))
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        self._ranks().run(lambda: super(ZeroampMixin, self)._save_rng_state(output_dir))

    def _ranks(self) -> RankGroup:
        return RankGroup.for_saving(wrap_state(self.model).axes.whole)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(
            Path(output_dir) / _STATE,
            self.model,
            self.train_step,
            step=self.state.global_step,
            keep=1,  # a resumed run may save at this step again
            exclude_frozen_parameters=is_peft_model(self.model),  # a resuming script builds the base model again
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    # ---- loading

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train. `resume_from_checkpoint=True` resumes from the newest complete checkpoint of `output_dir`.

        If saves have begun there, but none has ended, the training starts anew, with a warning.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _newest_complete(self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check that the checkpoint can be resumed from. It is loaded later, when the model is wrapped."""
        del model
        folder = Path(resume_from_checkpoint)
        if (folder / OPTIMIZER_NAME).exists() or not ((folder / _STATE).is_dir() or _has_weights(folder)):
            raise CheckpointError(
                f"Cannot resume from {folder}: it has neither a folder {_STATE} nor weights alone, so no Trainer on "
                "zeroamp saved it. Pass the weights of another checkpoint as the model, and start a new run."
            )
        if not _is_complete(folder):
            raise CheckpointError(
                f"Cannot resume from {folder}: it has no readable {TRAINER_STATE_NAME}, so the process ended inside of "
                "the save. resume_from_checkpoint=True takes the newest complete checkpoint."
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if not (folder / _STATE).is_dir():
            logger.warning("%s has only weights (save_only_model): optimizer and scheduler start from scratch.", folder)
            self._load_weights(folder)
            return
        # The Trainer restores the random states itself, after seeding the workers of the data loader.
        with preserved_random_state(self.args.device.type):
            load_checkpoint(folder / _STATE, self.model, self.train_step, load_lr_scheduler_states=False)
        state = torch.load(folder / SCHEDULER_NAME, map_location="cpu", weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: the loss scale is part of the checkpoint's state."""

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        logger.info("Loading the best model, from %s (score: %s).", best, self.state.best_metric)
        if (best / _STATE).is_dir():  # in fp32; the files beside it may be in 16 bits
            load_checkpoint(best / _STATE, self.model)
        else:
            self._load_weights(best)

    def _load_weights(self, folder: Path) -> None:
        if not is_peft_model(self.model):
            load_hf(self.model, folder)
            return
        for name in self.model.peft_config:
            load_adapter(self.model, folder if name == "default" else folder / name, name)


class TrainerAccelerator(ZeroampAccelerator):
    """A `ZeroampAccelerator` inside a Trainer. The Trainer counts micro-batches and divides losses."""

    _divides_losses = False

    def __init__(self, trainer: ZeroampMixin, **kwargs: Any) -> None:
        """`kwargs`: of `Accelerator`."""
        self._trainer = trainer
        super().__init__(zeroamp=trainer.filled_config(None), **kwargs)

    def policy_for(self, model: nn.Module | None) -> Policy:
        """Return the Trainer's policy for a model. accelerate's number of micro-batches is 1 in a Trainer."""
        return self._trainer.policy_of(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap `model` in place, and return it."""
        self.wrap_arguments = self._trainer.prepare_wrap(model, self.policy)
        return super().wrap(model)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """See `ZeroampAccelerator`. A Trainer passes infinity for a norm without clipping."""
        return super().clip_grad_norm_(parameters, 0.0 if math.isinf(max_norm) else max_norm, norm_type)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release what the last training prepared. A Trainer calls this before each training."""
        before = self._before  # for an optimizer that was built before an evaluation wrapped the model
        freed = super().free_memory(*objects)
        self._before = before
        return freed


class ZeroampTrainer(ZeroampMixin, Trainer):  # type: ignore[misc]
    """transformers' `Trainer` on zeroamp."""


def _newest_complete(output_dir: str) -> str | bool | None:
    """Return the newest complete checkpoint, and warn of newer ones that are not.

    None if all are incomplete: the training then starts anew. True if there is none: the Trainer's own error is right.
    """
    start, incomplete = f"{PREFIX_CHECKPOINT_DIR}-", []
    names = (path.name.removeprefix(start) for path in Path(output_dir).glob(f"{start}*"))
    for step in sorted((int(name) for name in names if name.isdecimal()), reverse=True):
        if _is_complete(path := Path(output_dir, f"{start}{step}")):
            return str(path)
        incomplete.append(path)
        logger.warning("%s is not loaded: the process that saved it ended inside of the save. Remove it.", path)
    if not incomplete:
        return True
    logger.warning("The training starts anew: the saves of %s did not end.", ", ".join(map(str, incomplete)))
    return None


def _is_complete(folder: Path) -> bool:
    """Return whether a save of `checkpoint-N` has ended: the Trainer writes its state last."""
    try:
        return isinstance(json.loads((folder / TRAINER_STATE_NAME).read_text()), dict)
    except (FileNotFoundError, ValueError):
        return False


def _has_weights(folder: Path) -> bool:
    return any((folder / name).exists() for name in (SINGLE_FILE, INDEX, f"{ADAPTER_STEM}.safetensors"))


@contextmanager
def _accelerator_class(build: Callable[..., TrainerAccelerator]) -> Iterator[None]:
    """Make `Trainer` build another accelerator, by replacing the class in the globals of its module."""
    module: Any = transformers.trainer
    plain = module.Accelerator
    module.Accelerator = build
    try:
        yield
    finally:
        module.Accelerator = plain
