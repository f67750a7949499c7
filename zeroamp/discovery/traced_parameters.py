"""Finds the parameters that may be all-gathered in a low dtype, from their uses in one run of the model."""

import logging
import os
import traceback
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.discovery.caches import nothing_left
from zeroamp.discovery.data_flow import DataFlow
from zeroamp.discovery.fake_run import example_arguments, fake_run
from zeroamp.discovery.use_recorder import ParameterRecord, UseRecorder
from zeroamp.hooks._torch.dispatch import needs_values
from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.dtypes import stored_dtype
from zeroamp.policies.errors import ConfigError, WrapError
from zeroamp.policies.safe_modules import KEY

logger = logging.getLogger("zeroamp")


@dataclass(frozen=True, kw_only=True, slots=True)
class SafeParameters:
    """The result of `discover_safe_parameters`. Names are those of `model.named_parameters()`."""

    safe: frozenset[str]
    """Parameters that are only ever cast to the low dtype. A tied weight has its first name here."""
    reasons: Mapping[str, str]
    """For every parameter, safe or not: the op and the module that decide, and the other names of a tied weight."""
    needs_values: str = ""
    """Where the model needs the value of a tensor, which fake tensors do not have. No parameter is decided then."""

    def __str__(self) -> str:
        """Return one line for each parameter: its name, whether it is safe, and why."""
        lines = [f"{name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join([f"{len(self.safe)} of {len(self.reasons)} parameters are safe", *lines])


def discover_safe_parameters(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device_type: str = "cpu",
) -> SafeParameters:
    """Run the model's forward and backward once under autocast, and find the parameters that it only casts to `dtype`.

    All-gathering these parameters in `dtype` changes no bit of the output or of a gradient. Parameters of which the run
    does not show this are not safe. The run is on fake tensors: it computes nothing, needs no memory, and works on the
    meta device. It covers the code that these inputs and the current `training` flags reach. The model is not changed,
    and no cache of its code retains a fake tensor. Other changes that its forward makes to other objects remain.

    Args:
        model: A plain model, before `wrap_model`.
        args: Positional inputs of the forward, on any device.
        kwargs: Keyword inputs. With no inputs at all, those of a transformers model's `dummy_inputs` are used.
        dtype: torch.bfloat16 or torch.float16.
        device_type: Where the model will run. Autocast has a different list of ops for each device type.

    Raises:
        ConfigError: there are no inputs, the forward or backward raises on fake tensors, or the model's code retains a
            fake tensor that cannot be removed. If the run raises because it needs the value of a tensor, a warning is
            logged, and no parameter is safe.
        WrapError: the model is wrapped already.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise WrapError(
            f"FSDP2 has sharded {type(model).__name__} already. Call discover_safe_parameters before wrap_model or "
            "fully_shard."
        )
    if not args and not kwargs:
        args, kwargs = example_arguments(model)
    with nothing_left(model) as made:
        return _Run(model, args, kwargs or {}, dtype, device_type, made).safe_parameters()


@dataclass(frozen=True, slots=True)
class _Run:
    """Runs of a model on fake tensors, forward and backward, each with the same inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtype: torch.dtype
    device_type: str
    made: list[ReferenceType[torch.Tensor]]
    """Gets a weak reference to each fake tensor."""

    def safe_parameters(self) -> SafeParameters:
        """Return which parameters are safe. See `discover_safe_parameters`."""
        model, recorder = self.model, UseRecorder(self.dtype, self.model)
        try:
            self.run(recorder)
        # Any exception: fake tensors have no single class of error for "this needs a value".
        except Exception as error:
            if needs_values(error):
                return _undecided(model, _last_line(error))
            raise _not_traced(model, error) from error
        records = recorder.records
        readers = [name for name, record in records.items() if record.dtype_read_in is not None]
        # A parameter that is unsafe for another reason stays unsafe, whatever the read of its dtype returns.
        read_only = {name for name in readers if records[name].safety(self.dtype, ignore_dtype_read=True)[0]}
        harmless = self._same_in_low(read_only, records) if read_only else set()
        found = {name: rec.safety(self.dtype, ignore_dtype_read=name in harmless) for name, rec in records.items()}
        aliases = _aliases(model)
        return SafeParameters(
            safe=frozenset(name for name, (is_safe, _) in found.items() if is_safe),
            reasons={name: reason + aliases[name] for name, (_, reason) in found.items()},
        )

    def run(self, recorder: UseRecorder | DataFlow, low: Container[str] = ()) -> None:
        """Run the model once. Parameters in `low` have the low dtype, the others the one in which they are stored."""
        parameters = dict(self.model.named_parameters())
        in_low = {id(parameter) for name, parameter in parameters.items() if name in low}

        def dtype_of(tensor: torch.Tensor) -> torch.dtype:
            return self.dtype if id(tensor) in in_low else _stored(tensor)

        with fake_run(self.model, self.device_type, dtype_of, self.made) as fakes:
            for name, parameter in parameters.items():
                recorder.add(name, parameter, fakes.of(parameter))
            args, kwargs = fakes.of(tuple(self.args)), fakes.of(dict(self.kwargs))
            try:
                with recorder.attached():
                    with torch.autocast(self.device_type, dtype=self.dtype):
                        outputs = self.model(*args, **kwargs)
                    recorder.note_outputs(outputs)
                    roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
                    if roots:
                        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            finally:
                torch.clear_autocast_cache()  # autocast itself clears it when the outermost context ends: the caller's

    def _same_in_low(self, names: set[str], records: Mapping[str, ParameterRecord]) -> set[str]:
        """Return those of `names` that may be in the low dtype, though the model reads their dtype.

        With them in the low dtype, the model runs the same ops on the same values. Parameters with the same name in
        modules of the same class are decided together, so that deeper models need no more runs.
        """
        as_stored = DataFlow(self.dtype)
        self.run(as_stored)
        safe = {name for name, record in records.items() if record.safety(self.dtype)[0]}

        def is_same(low: set[str]) -> bool:
            flow = DataFlow(self.dtype)
            try:
                self.run(flow, safe | low)
            except Exception:  # an op refuses the low dtype
                return False
            return flow.is_same(as_stored)

        if is_same(names):
            return names
        kinds = dict[tuple[type[nn.Module], str], set[str]]()
        for name in names:
            owner, _, own_name = name.rpartition(".")
            kinds.setdefault((type(self.model.get_submodule(owner)), own_name), set()).add(name)
        harmless = set[str]().union(*(kind for kind in kinds.values() if is_same(kind)))
        return harmless if is_same(harmless) else set()


def _stored(tensor: torch.Tensor) -> torch.dtype:
    return stored_dtype(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype


def _undecided(model: nn.Module, place: str) -> SafeParameters:
    logger.warning(
        "%s needs the value of a tensor%s, so its traced run decides nothing: all parameters are all-gathered in their "
        'own dtype. The bits are right, but %s "auto" saves nothing. List classes of modules there instead.',
        *(type(model).__name__, place, KEY),
    )
    reason = f"not decided, so not safe: the model needs the value of a tensor{place}"
    reasons = {name: f"{reason}{names}" for name, names in _aliases(model).items()}
    return SafeParameters(safe=frozenset(), reasons=reasons, needs_values=place)


def _not_traced(model: nn.Module, error: Exception) -> ConfigError:
    """Return the error for a model whose run on fake tensors raised."""
    message = (str(error).splitlines() or [""])[0]
    return ConfigError(
        f"{type(model).__name__} cannot be run on fake tensors{_last_line(error)}: {type(error).__name__}: {message}. "
        f'Check that the example inputs fit the forward, or list classes of modules in {KEY} instead of "auto".'
    )


def _last_line(error: BaseException) -> str:
    """Return the last line of a traceback outside of torch and zeroamp as text, with " at " in front."""
    own = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(own)]
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _aliases(model: nn.Module) -> dict[str, str]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: f" (tied: {', '.join(others)})" if others else "" for first, *others in names.values()}
