"""Loads a DeepSpeed checkpoint into a `TrainStep`: optimizer state, param groups, counters, loss scale, scheduler."""

import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroamp.deepspeed.contents import Contents, Moments, find
from zeroamp.deepspeed.files import unreadable
from zeroamp.deepspeed.layout import StoredTensor, fill
from zeroamp.optimizers.schedulers import CurveLR
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.training.step import TrainStep
from zeroamp.weights.model_weights import Weight

_ALONE = "Leave out train to load the weights alone."
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")
_FLAGS = {"amsgrad": False, "maximize": False, "bias_correction": True, "decoupled_weight_decay": None}
"""Flag that changes the update -> its value in an optimizer without the flag. The saved flags must be the optimizer's.
"""
_WITHOUT_EFFECT = {"params", "step", "foreach", "fused", "capturable", "differentiable", *_FLAGS, *_HYPERPARAMETERS}
"""Keys of a saved param group that are handled elsewhere, or that only select an implementation of the same update."""


@dataclass(kw_only=True, slots=True)
class Training:
    """State to load into a `TrainStep`, and the names of what is not loaded."""

    train: TrainStep
    moments: list[tuple[int, nn.Parameter, float, dict[str, StoredTensor]]] = field(default_factory=list)
    """(index in the optimizer, parameter, steps, state by key)."""
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    step_state: dict[str, Any] = field(default_factory=dict)
    scheduler_state: dict[str, Any] | None = None
    not_loaded: list[str] = field(default_factory=list)

    def apply(self) -> None:
        """Load the state into the `TrainStep`."""
        optimizer = self.train.optimizers[0]
        state = {index: _adam_state(parameter, step, stored) for index, parameter, step, stored in self.moments}
        optimizer.load_state_dict({"state": state, "param_groups": self.param_groups})
        self.train.load_state_dict(self.step_state)
        if self.scheduler_state is not None and isinstance(self.train.schedulers[0], CurveLR):
            self.train.schedulers[0].load_state_dict(self.scheduler_state)


def _adam_state(parameter: nn.Parameter, step: float, stored: dict[str, StoredTensor]) -> dict[str, torch.Tensor]:
    state = {"step": torch.tensor(step, dtype=torch.float32)}
    for key, tensor in stored.items():
        state[key] = torch.empty_like(parameter, requires_grad=False)
        fill(state[key], tensor)
    return state


def plan_training(
    train: TrainStep, weights: list[Weight], contents: Contents, path: Path, with_scheduler: bool
) -> Training:
    """Return what to load into `train`, without changing it.

    Raises:
        CheckpointError: the optimizer is not an Adam, has other flags, or has one param group for several different
            ones of the checkpoint.
        StepError: called inside an optimizer step.
    """
    current = train.state_dict()
    plan = Training(train=train, param_groups=train.optimizers[0].state_dict()["param_groups"])
    moments = contents.moments
    if moments is None or not isinstance(train.optimizers[0], torch.optim.Adam):
        problem = "was saved at ZeRO stage 0, where DeepSpeed stores it without parameter names"
        if moments is not None:
            found = type(train.optimizers[0]).__name__
            problem = f"can be loaded into torch.optim.Adam or AdamW, but the optimizer is {found}"
        raise CheckpointError(f"The optimizer state of {path} {problem}. {_ALONE}")
    names = {id(weight.tensor): weight.names for weight in weights}
    stored_names = _map_parameters(plan, names, contents.aliases, moments)
    _plan_groups(plan, moments, stored_names)
    plan.step_state = current | {
        "num_steps": contents.global_steps - contents.skipped_steps,
        "num_skipped": contents.skipped_steps,
    }
    _plan_loss_scale(plan, contents)
    if with_scheduler:
        _plan_scheduler(plan, contents)
    elif contents.lr_scheduler is not None:
        plan.not_loaded.append("the scheduler's state (load_lr_scheduler_states is False)")
    return plan


def _map_parameters(
    plan: Training, names: dict[int, tuple[str, ...]], aliases: dict[str, str], moments: Moments
) -> list[list[str]]:
    """Plan the moments. Return the stored names of the parameters in each param group of the optimizer.

    `names`: id of a parameter of the model -> its names.
    """
    by_group: list[list[str]] = []
    index = 0
    for group in plan.train.optimizers[0].param_groups:
        by_group.append([])
        for parameter in group["params"]:
            for name in find(names[id(parameter)], aliases, moments.group_of):
                by_group[-1].append(name)
                if name in moments.tensors:
                    state = moments.tensors[name]
                    left_out = [key for key in state if key not in _MOMENTS]
                    plan.not_loaded += [f"{key} of {name}" for key in left_out]
                    _refuse_incomplete(name, state)
                    known = {key: value for key, value in state.items() if key in _MOMENTS}
                    plan.moments.append((index, parameter, moments.steps[name], known))
            index += 1
    held = {name for group in by_group for name in group}
    plan.not_loaded += [
        f"optimizer state of {name}, which the optimizer does not hold" for name in moments.tensors if name not in held
    ]
    return by_group


def _refuse_incomplete(name: str, state: dict[str, StoredTensor]) -> None:
    if not {"exp_avg", "exp_avg_sq"} <= state.keys():
        where = f"The saved optimizer state of {name}"
        raise CheckpointError(describe(where, ", ".join(state), "exp_avg and exp_avg_sq, as Adam's", _ALONE))


def _plan_groups(plan: Training, moments: Moments, stored_names: list[list[str]]) -> None:
    if moments.param_groups is None:
        plan.not_loaded.append("hyperparameters of the param groups, which elastic_checkpoint does not save")
        return
    for index, (group, names) in enumerate(zip(plan.param_groups, stored_names, strict=True)):
        numbers = sorted({moments.group_of[name] for name in names})
        saved = [moments.param_groups[number] for number in numbers]
        values = [{key: _plain(key, entry[key]) for key in _HYPERPARAMETERS if key in entry} for entry in saved]
        if any(value != values[0] for value in values):
            raise CheckpointError(
                f"optimizer.param_groups[{index}] holds parameters of the saved groups {numbers}, whose "
                f"hyperparameters differ: {values}. Build the optimizer with the param groups of the saved one."
            )
        for number, entry in zip(numbers, saved, strict=True):
            _refuse_flags(index, group, number, entry)
            plan.not_loaded += [f"{key} of param group {number}" for key in entry if key not in _WITHOUT_EFFECT]
        for key, value in values[0].items() if values else ():
            # A learning rate that is a tensor (capturable, compiled) stays one.
            group[key] = group[key].new_tensor(value) if isinstance(group[key], torch.Tensor) else value


def _plain(key: str, value: Any) -> float | tuple[float, ...]:
    values = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(v, (int, float)) or (isinstance(v, torch.Tensor) and v.numel() == 1) for v in values):
        raise unreadable(f"{key} of the saved param groups", reprlib.repr(value), "a number, or several")
    return tuple(map(float, values)) if values is value else float(value)


def _refuse_flags(index: int, group: dict[str, Any], number: int, saved: dict[str, Any]) -> None:
    for key, default in _FLAGS.items():
        ours = group.get(key, default)
        if key in saved and ours is not None and bool(saved[key]) != bool(ours):
            raise CheckpointError(
                f"optimizer.param_groups[{index}]: {key} must be {reprlib.repr(saved[key])}, as in the saved group "
                f"{number}, but is {ours}. Build the optimizer as the saved one was built (AdamW decouples the weight "
                "decay, Adam does not), or leave out train to load the weights alone."
            )


def _plan_loss_scale(plan: Training, contents: Contents) -> None:
    """Load DeepSpeed's dynamic loss scale if the config has one too; its rules are those of `LossScale`."""
    fields = contents.loss_scaler.state if contents.loss_scaler is not None else {}
    if not isinstance(fields, dict):
        raise unreadable("loss_scaler", f"an object with a {type(fields).__name__}", "an object of DeepSpeed")
    if not fields.get("dynamic"):
        if fields.get("cur_scale", 1.0) != 1.0 and plan.step_state["loss_scale"]["scale"] != fields["cur_scale"]:
            plan.not_loaded.append(f"the fixed loss scale {fields['cur_scale']:g}")
        return
    keys = {
        "scale": "cur_scale",
        "hysteresis_left": "cur_hysteresis",
        "num_steps": "cur_iter",
        "last_overflow": "last_overflow_iter",
    }
    values = {ours: fields.get(theirs) for ours, theirs in keys.items()}
    if not all(isinstance(value, (int, float)) for value in values.values()):
        raise unreadable("loss_scaler", reprlib.repr(values), "four numbers")
    if plan.step_state["loss_scale"]["kind"] != "dynamic":
        plan.not_loaded.append(f"the dynamic loss scale {values['scale']:g}: the config has none")
        return
    plan.step_state["loss_scale"] = {"kind": "dynamic", **values}


def _plan_scheduler(plan: Training, contents: Contents) -> None:
    """Set a scheduler of the config to the next step. DeepSpeed's saved count is that of the previous step."""
    saved = contents.lr_scheduler
    if saved is None:
        return
    scheduler = plan.train.schedulers[0]
    if isinstance(scheduler, CurveLR) and set(saved) == {"last_batch_iteration"}:
        plan.scheduler_state = scheduler.state_dict() | {"last_epoch": plan.step_state["num_steps"]}
    else:
        plan.not_loaded.append("the scheduler's state, which lr_scheduler of the result holds")
