"""Finds the parameters that may be all-gathered in a low dtype, from their uses in one run of the model."""

import logging
import os
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.discovery.autocast_ops import casting, register
from zeroamp.discovery.fake_run import example_arguments, fake_run
from zeroamp.discovery.use_recorder import UseRecorder
from zeroamp.hooks._torch.dispatch import needs_values
from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.dtypes import LOW_DTYPES, stored_dtype
from zeroamp.policies.errors import ConfigError, WrapError, describe
from zeroamp.policies.safe_modules import KEY

logger = logging.getLogger("zeroamp")


@dataclass(frozen=True, kw_only=True, slots=True)
class SafeParameters:
    """The result of `discover_safe_parameters`. Names are those of `model.named_parameters()`."""

    safe: frozenset[str]
    """Parameters that are only ever cast to the low dtype. A tied weight has its first name here."""
    reasons: Mapping[str, str]
    """For every parameter, safe or not: the op and the module that decide, and the other names of a tied weight."""
    by_ops: frozenset[str] = frozenset()
    """The safe parameters that are only cast for ops of `autocast_ops`."""
    cast_modules: frozenset[str] = frozenset()
    """FQNs of the modules whose own forward ran an op of `autocast_ops` that had an argument to cast."""
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
    autocast_ops: Collection[str] = (),
) -> SafeParameters:
    """Run the model's forward and backward once under autocast, and find the parameters that it only casts to `dtype`.

    All-gathering these parameters in `dtype` changes no bit of the output or of a gradient. Parameters of which the run
    does not show this are not safe. The run is on fake tensors: it computes nothing, needs no memory, and works on the
    meta device. It covers the code that these inputs and the current `training` flags reach. The model is not changed.
    Changes that its forward makes to other objects remain.

    Args:
        model: A plain model, before `wrap_model`.
        args: Positional inputs of the forward, on any device.
        kwargs: Keyword inputs. With no inputs at all, those of a transformers model's `dummy_inputs` are used.
        dtype: torch.bfloat16 or torch.float16.
        device_type: Where the model will run. Autocast has a different list of ops for each device type.
        autocast_ops: Further ops whose arguments autocast will cast: names of `zeroamp.autocast_ops`.

    Raises:
        ConfigError: the dtype or device type cannot be used here; there are no inputs; this torch's autocast casts
            one of `autocast_ops` itself; or the forward or backward raises on fake tensors. If it raises because it
            needs the value of a tensor, a warning is logged, and no parameter is safe.
        WrapError: the model is wrapped already.
    """
    _check_target(model, dtype, device_type)
    if not args and not kwargs:
        args, kwargs = example_arguments(model)
    register_ops(autocast_ops, device_type)
    run = partial(_run, model, args, kwargs or {}, dtype, device_type, frozenset(autocast_ops))
    try:
        recorder = run()
    except ConfigError as error:
        if error.__cause__ is None or not needs_values(error.__cause__):
            raise
        return _undecided(model, _last_line(error.__cause__))
    records = recorder.records
    found = {name: record.safety(dtype) for name, record in records.items()}
    _decide_readers(recorder, found, dtype, run)
    aliases = _aliases(model)
    return SafeParameters(
        safe=frozenset(name for name, (is_safe, _) in found.items() if is_safe),
        reasons={name: reason + aliases[name] for name, (_, reason) in found.items()},
        by_ops=frozenset(name for name, (is_safe, _) in found.items() if is_safe and records[name].is_cast_by_ops_only),
        cast_modules=frozenset(recorder.cast_modules),
    )


def register_ops(names: Collection[str], device_type: str) -> None:
    """Register the autocast kernels of these ops in this process, for a device type.

    Raises:
        ConfigError: this torch's autocast casts one of them by itself.
    """
    if casts := register(names, device_type):
        raise ConfigError(
            f"zeroamp.autocast_ops must not name {', '.join(casts)} with torch {torch.__version__}, whose autocast "
            'casts it without the key. Remove it, and write "lower_precision_safe_modules": "auto" in torch_autocast.'
        )


def _check_target(model: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise WrapError(
            f"FSDP2 has sharded {type(model).__name__} already. Call discover_safe_parameters before wrap_model or "
            "fully_shard."
        )
    if dtype not in LOW_DTYPES:
        remedy = "Pass the dtype in which parameters are to be all-gathered."
        raise ConfigError(describe("dtype", dtype, "torch.bfloat16 or torch.float16", remedy))
    try:
        is_usable = device_type == "cpu" or bool(torch.get_device_module(device_type).is_available())
    except (RuntimeError, AttributeError):
        is_usable = False
    if not is_usable:
        raise ConfigError(
            describe(
                "device_type",
                f"{device_type!r}, of which there is no device here",
                '"cpu", or the type of an accelerator that is here',
                "Autocast casts other ops on other device types. Trace where the model will run, or name classes.",
            )
        )


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dtype: torch.dtype,
    device_type: str,
    ops: frozenset[str],
    low: Collection[str] = (),
) -> UseRecorder:
    """Run forward and backward once on fake tensors.

    Parameters have the dtypes in which `wrap_model` stores them. Those whose FQNs are in `low` have `dtype`.
    """
    parameters = dict(model.named_parameters())
    low_ids = {id(parameters[name]) for name in low}

    def dtype_of(tensor: torch.Tensor) -> torch.dtype:
        stored = stored_dtype(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype
        return dtype if id(tensor) in low_ids else stored

    recorder = UseRecorder(dtype, model)
    with fake_run(model, device_type, dtype_of) as fakes:
        for name, parameter in parameters.items():
            recorder.add(name, parameter, fakes.of(parameter))
        args, kwargs = fakes.of(tuple(args)), fakes.of(dict(kwargs))
        try:
            with recorder.attached(), casting(ops):  # in recomputation, too
                with torch.autocast(device_type, dtype=dtype):
                    outputs = model(*args, **kwargs)
                recorder.note_outputs(outputs)
                roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        # Any exception: fake tensors have no single class of error for "this needs a value".
        except Exception as error:
            raise _not_traced(model, error) from error
        finally:
            torch.clear_autocast_cache()  # autocast itself clears it when the outermost context ends: the caller's
    return recorder


def _decide_readers(
    recorder: UseRecorder, found: dict[str, tuple[bool, str]], dtype: torch.dtype, run: Callable[..., UseRecorder]
) -> None:
    """Mark parameters as not safe if the model reads their dtype, and runs other ops with the low dtype.

    The model is run once more with these parameters in the low dtype. It must run the same program.
    """
    readers = {
        name: record.dtype_read_in
        for name, record in recorder.records.items()
        if found[name][0] and record.dtype_read_in is not None and stored_dtype(record.parameter) != dtype
    }
    if not readers:
        return
    try:
        program = run(low=readers.keys()).program
    except ConfigError:
        program = []
    pairs = zip_longest(recorder.program, program, fillvalue="nothing")
    change = next((f"{old} into {new}" for old, new in pairs if old != new), None)
    if change is not None:
        for name, place in readers.items():
            found[name] = False, f"not safe: its dtype is read in {place}, and another dtype changes {change}"


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
        f'Check that the example inputs fit the forward, or list classes of modules in {KEY} instead of "auto", and '
        "leave zeroamp.autocast_ops out."
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
