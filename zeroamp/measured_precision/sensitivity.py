"""`zeroamp.sensitivity`: measures which modules of a wrapped model can be computed in low precision."""

import logging
import math
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroamp.hooks.tensors import map_tensors, tensors_in
from zeroamp.ledger.observed_step import refuse_gradients
from zeroamp.measured_precision.groups import BY_ROLE, ModuleGroup, find_groups
from zeroamp.measured_precision.result import Sensitivity
from zeroamp.measured_precision.runs import LossOf, Run, Runs, Squares, ratio
from zeroamp.measured_precision.switch import PrecisionSwitch
from zeroamp.planning.mesh import device_of, is_first_rank
from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.errors import ConfigError, StepError, WrapError
from zeroamp.policies.numbers import counted
from zeroamp.wrapping.run_alike import Description, run_alike
from zeroamp.wrapping.state import WrapState, refuse_part, wrap_state

logger = logging.getLogger("zeroamp")

_NUM_QUICK = 10
"""Groups that `quick` measures."""


def sensitivity(
    model: nn.Module,
    batches: Sequence[Any],
    loss_of: LossOf | None = None,
    *,
    groups: str | Sequence[str] = BY_ROLE,
    budget: float | None = None,
    quick: bool = False,
) -> Sensitivity:
    """Measure what low precision of each group of modules costs, and which modules to keep in fp32.

    Call it on all ranks, between two optimizer steps, without gradients. It runs 2 x groups + 5 forwards and backwards
    of all batches, and a few more if it recommends groups. It takes no optimizer step: parameters, buffers, random
    states and counters are afterwards what they were, also if it raises. Meanwhile parameters are all-gathered in fp32,
    and each rank holds its shards of up to three fp32 gradients. An error of one rank, also of `loss_of`, is raised on
    all: each collective waits for an exchange of errors, so the runs are slower than those of a training.

    Args:
        model: a wrapped model in mode `torch_autocast`, on any number of ranks.
        batches: a list of this rank's batches: at least two, or one with two samples or more.
        loss_of: returns the loss of (model, batch). Default: the model is called with the batch, a tensor, a tuple of
            arguments or a mapping of keyword arguments, and returns the loss, or an output with `.loss`.
        groups: "class and role"; "depth", which are thirds of the blocks; or a list of patterns, as those of
            `keep_in_fp32_modules`. The first one that matches a module applies.
        budget: the largest change of the gradient, relative to its norm, that you accept. None: the noise.
        quick: measure only the ten groups with the most bytes. The recommendation consists of these.

    Raises:
        ConfigError: a pattern matches nothing, or the config does not use `torch_autocast`.
        StepError: there is an unfinished optimizer step or a gradient, batches are missing or differ in shape between
            ranks, the loss in fp32 is not finite, a run does not fit into memory, or a run failed on some ranks.
        PeerError: the backend ended a collective, because it timed out or another rank's process ended.
        WrapError: the model is not wrapped, is asleep, or has a tensor, expert or pipeline axis.

    Examples:
        >>> policy = zeroamp.policy_from_config({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
        >>> model = zeroamp.wrap_model(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), policy)
        >>> found = zeroamp.sensitivity(model, [torch.ones(4, 8)], lambda model, batch: model(batch)[:, 0].sum())
        >>> [row["group"] for row in found.rows]
        ['Linear', 'LayerNorm', 'between the modules']
    """
    state = wrap_state(model)
    found = run_alike(
        partial(_checked, state, batches, groups, budget, quick),
        what="sensitivity",
        remedy="Pass as many batches of the same shapes, and the same groups, budget and quick, on all ranks.",
        error_type=StepError,
        group=state.world,
        device=device_of(state.mesh),
    )
    with torch.inference_mode(False), torch.enable_grad():
        return _Measurement(state, model, batches, loss_of, found, quick=quick).result(budget)


def _checked(
    state: WrapState, batches: Sequence[Any], groups: str | Sequence[str], budget: float | None, quick: object
) -> tuple[list[ModuleGroup], Description]:
    """Return the groups, and what must be equal on all ranks. Raises as `sensitivity` does."""
    policy = state.plan.policy
    if policy.mode != "autocast" or any(param.has_own_gather_dtype for param in state.plan.params):
        found = "zeroamp.param_gather_dtype" if policy.mode == "autocast" else f"{policy.mode} precision"
        raise ConfigError(
            f"sensitivity measures what torch.autocast costs, but the config sets {found}. For the measurement, wrap "
            'the model with "torch_autocast": {"enabled": true, "dtype": "bfloat16"} (or "float16") in place of it.'
        )
    if low := [param.fqn for param in state.plan.params if param.dtypes.stored in LOW_DTYPES]:
        raise ConfigError(
            f"sensitivity cannot run {low[0]} in fp32, because it is frozen and stored in a low precision. Call "
            ".float() on the model before wrap_model for the measurement."
        )
    refuse_part(state, "sensitivity", "Measure the whole model.")
    if not state.axes.is_plain:
        raise WrapError("sensitivity is not supported with tensor or expert parallelism. Measure with data ranks only.")
    state.step.refuse_after_failure("sensitivity")
    refuse_gradients(state, "sensitivity")
    if not isinstance(batches, list) or not batches:
        found = "an empty list" if isinstance(batches, list) else f"a {type(batches).__name__}"
        raise StepError(f"sensitivity(batches=) must be a list of batches, but is {found}. Pass [batch].")
    _halves(batches)
    if budget is not None and not (isinstance(budget, int | float) and 0 < budget < math.inf):
        raise ConfigError(f"sensitivity(budget=) must be a positive number, but is {budget!r}. 0.01 accepts 1 %.")
    shapes = {f"the shapes of batch {i}": str([tuple(t.shape) for t in tensors_in(b)]) for i, b in enumerate(batches)}
    asked = {"groups": str(groups), "budget": str(budget), "quick": str(quick)}
    return find_groups(state.root, state.plan, groups), {**shapes, **asked}


def _halves(batches: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return two halves of the batches, or of the samples of the only one."""
    middle = len(batches) // 2
    if middle:
        return batches[:middle], batches[middle:]
    num = next((len(tensor) for tensor in tensors_in(batches[0]) if tensor.dim()), 0)
    if num < 2:
        raise StepError(
            "sensitivity needs two halves of the batches, whose difference is the noise, but got one batch of "
            f"{num} sample(s). Pass two batches, or one with more samples in dimension 0 of its tensors."
        )

    def half(rows: slice) -> list[Any]:
        return [map_tensors(lambda each: each[rows] if each.dim() and len(each) == num else each, batches[0])]

    return half(slice(0, num // 2)), half(slice(num // 2, num))


class _Measurement:
    """The runs of one call of `sensitivity`, and what follows from them."""

    def __init__(
        self,
        state: WrapState,
        model: nn.Module,
        batches: Sequence[Any],
        loss_of: LossOf | None,
        groups: Sequence[ModuleGroup],
        *,
        quick: bool,
    ) -> None:
        self._state, self._batches, self._groups = state, batches, groups
        by_size = sorted(groups, key=lambda group: -sum(param.numel for param in group.params))
        self._measured = by_size[:_NUM_QUICK] if quick else groups
        self._choices: dict[frozenset[str], tuple[dict[str, Any], Squares]] = {}
        """Names of groups in fp32, all others in low precision -> that choice, and the difference to the reference."""
        self._dtype = state.plan.policy.param_dtype
        of = {fqn: group.name for group in groups for fqn in group.modules}
        of_modules = {module: of[fqn] for fqn, module in state.root.named_modules() if fqn in of}
        self._switch = PrecisionSwitch(of_modules, state.mesh.device_type, self._dtype)
        self._runs = Runs(state, model, loss_of, self._switch)
        self._begin, self._num_done, self._num_planned = time.perf_counter(), 0, 2 * len(self._measured) + 5
        self._log(
            f"{counted(len(self._measured), 'group')}: {self._num_planned} runs, each a forward and backward of "
            f"{counted(len(batches), 'batch', 'batches')}, and a few more to recommend groups"
        )

    def result(self, budget: float | None) -> Sensitivity:
        """Run everything. The config's own run is the first one: FSDP2 sets its dtypes up in it."""
        as_configured = self._run(self._batches)
        with self._runs.in_fp32():
            with self._switch:  # counts FLOPs
                self._fp32 = self._run(self._batches)
            if not math.isfinite(self._fp32.loss):
                raise StepError(
                    "sensitivity: the loss in fp32 is not finite, so nothing can be compared with it. Its cause is in "
                    "the batches or the weights, and not in low precision."
                )
            self._whole = self._runs.squares(self._fp32.gradient)
            config_change = ratio(self._difference(as_configured), self._whole)
            del as_configured
            first, second = (self._run(half) for half in _halves(self._batches))
            noise = ratio(self._runs.squares(first.gradient, second.gradient), self._whole) / 2
            del first, second
            all_low = self._all_but([])
            low_change = ratio(all_low, self._whole)
            rows = [self._row(group) for group in self._measured]
            limit = noise if budget is None else budget
            chosen, change = self._choose(rows, low_change, limit)
        names = ", ".join(group.name for group in chosen) or "no group"
        aim = f"{change:.2g}, and {'the noise' if budget is None else 'the budget'} is {limit:.2g}."
        advice = f"Compute in fp32: {names}. In a run with this the gradient changes by {aim}"
        if not chosen:
            advice = f"Nothing is needed: the gradient changes by {aim}"
        if change > limit:
            advice = f"Nothing helps: with {names} in fp32 the gradient still changes by {aim}"
            chosen = []
        return Sensitivity(
            rows=tuple(sorted(rows, key=lambda row: -float(row["gradient_change"]))),
            low=short_name(self._dtype),
            noise=noise,
            config_change=config_change,
            low_change=low_change,
            recommended=self._block(chosen),
            recommended_change=change if chosen else None,
            advice=advice,
            choices=tuple(choice for choice, _ in self._choices.values()),
            parameter_changes={fqn: ratio(all_low, self._whole, [fqn]) for fqn in self._whole},
        )

    def _log(self, text: str) -> None:
        if is_first_rank(self._state.axes.whole):
            logger.info("sensitivity: %s", text)

    def _run(self, batches: Sequence[Any], low: Collection[str] = ()) -> Run:
        found = self._runs.run(batches, low)
        self._num_done += 1
        self._num_planned = max(self._num_planned, self._num_done)
        left = (time.perf_counter() - self._begin) / self._num_done * (self._num_planned - self._num_done)
        self._log(f"run {self._num_done} of {self._num_planned}, {left:.0f} s left")
        return found

    def _difference(self, found: Run) -> Squares:
        """Return the squares of the difference to the reference."""
        return self._runs.squares(found.gradient, self._fp32.gradient)

    def _all_but(self, groups: Collection[ModuleGroup]) -> Squares:
        """Return the difference with all groups but these in low precision, and note the change as a choice."""
        names = [each.name for each in groups]
        if (key := frozenset(names)) not in self._choices:
            low = [each.name for each in self._groups if each not in groups]
            found = self._difference(self._run(self._batches, low))
            num_bytes, change = sum(map(self._bytes_saved, groups)), ratio(found, self._whole)
            self._choices[key] = {"in_fp32": names, "bytes": num_bytes, "gradient_change": change}, found
        return self._choices[key][1]

    def _bytes_saved(self, group: ModuleGroup) -> int:
        """Return the bytes that low precision of a group saves in one all-gather."""
        numel = sum(param.numel for param in group.params if param.dtypes.param == self._dtype)
        return numel * (torch.float32.itemsize - self._dtype.itemsize)

    def _row(self, group: ModuleGroup) -> dict[str, Any]:
        alone = self._run(self._batches, [group.name])
        difference = self._difference(alone)
        own = [param.fqn for param in group.params if param.fqn in self._whole]
        lost = self._runs.lost_in(self._dtype, self._fp32.gradient, own) if self._dtype == torch.float16 else {}
        return {
            "group": group.name,
            "modules": list(group.modules),
            "loss_change": abs(alone.loss / self._fp32.loss - 1) if self._fp32.loss else math.inf,
            "gradient_change": ratio(difference, self._whole),
            "own_gradient_change": ratio(difference, self._whole, own),
            "gradient_change_of_others": ratio(self._all_but([group]), self._whole),
            "bytes_saved": self._bytes_saved(group),
            "flops_saved": 3 * self._switch.flops[group.name],  # a backward has about twice those of its forward
            **lost,
        }

    def _choose(
        self, rows: Sequence[dict[str, Any]], low_change: float, limit: float
    ) -> tuple[list[ModuleGroup], float]:
        """Return groups to keep in fp32, with few bytes, and the change of the gradient in a run with them in fp32.

        Groups are added until the change is within the limit: first those of which one is enough, the smallest first,
        and then those that change most per byte.
        """
        measured = zip(self._measured, rows, strict=True)
        usable = [(group, row) for group, row in measured if group.patterns and row["gradient_change"] > 0]

        def order(pair: tuple[ModuleGroup, dict[str, Any]]) -> tuple[bool, float]:
            _, row = pair
            if row["gradient_change_of_others"] <= limit:
                return False, row["bytes_saved"]
            return True, -(row["gradient_change"] ** 2) / max(1, row["bytes_saved"])

        chosen, change = list[ModuleGroup](), low_change
        for group, _ in sorted(usable, key=order):
            if change <= limit:
                break
            chosen.append(group)
            change = ratio(self._all_but(chosen), self._whole)
        return chosen, change

    def _block(self, chosen: Sequence[ModuleGroup]) -> dict[str, Any]:
        """Return the config's overrides with one more, in front, for the chosen groups."""
        if not chosen:
            return {}
        before = self._state.plan.policy.to_config().get("zeroamp", {}).get("overrides", [])
        patterns = [pattern for group in chosen for pattern in group.patterns]
        return {"zeroamp": {"overrides": [{"modules": patterns, "compute": "fp32"}, *before]}}
