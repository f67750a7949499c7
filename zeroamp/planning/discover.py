"""Finds the parameters that may be all-gathered in a low dtype, from their uses in one run of the model."""

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks.precision.autocast_ops import register
from zeroamp.hooks.tensors import tensors_in
from zeroamp.hooks.tracing.recorded_run import can_run_backward, record_run
from zeroamp.hooks.tracing.use_recorder import UseRecorder
from zeroamp.planning.example_inputs import example_arguments
from zeroamp.policies.dtypes import LOW_DTYPES, stored_dtype
from zeroamp.policies.errors import ConfigError, WrapError, describe
from zeroamp.policies.safe_modules import KEY
from zeroamp.policies.tables import render

logger = logging.getLogger("zeroamp")

MAX_REAL_RUN_BYTES = 1024**3
"""A model whose control flow depends on values is run on real copies, up to this many bytes of parameters (1 GiB)."""


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

    def __str__(self) -> str:
        """Return a table of all parameters: whether each is safe, and why."""
        rows = [
            {"parameter": name, "safe": "yes" if name in self.safe else "no", "why": reason}
            for name, reason in self.reasons.items()
        ]
        return f"{len(self.safe)} of {len(self.reasons)} parameters are safe\n{render(rows)}"


def discover_safe_parameters(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device_type: str = "cpu",
    autocast_ops: Collection[str] = (),
) -> SafeParameters:
    """Run the model's forward and backward once under autocast, and find the parameters that it only casts to `dtype`.

    All-gathering these parameters in `dtype` changes no bit of the output or of a gradient. The run is on fake tensors:
    it computes nothing, needs no memory, and works on the meta device. It covers the code that these inputs and the
    current `training` flags reach. The model is not changed. Changes that its forward makes to other objects remain.

    Args:
        model: A plain model, before `wrap_model`.
        args: Positional inputs of the forward, on any device.
        kwargs: Keyword inputs. With no inputs at all, those of a transformers model's `dummy_inputs` are used.
        dtype: torch.bfloat16 or torch.float16.
        device_type: Where the model will run. Autocast has a different list of ops for each device type.
        autocast_ops: Further ops whose arguments autocast will cast: names of `zeroamp.autocast_ops`.

    Raises:
        ConfigError: the dtype or device type cannot be used here; there are no inputs; this torch's autocast casts
            one of `autocast_ops` itself; or control flow depends on values and the model cannot be run on real copies,
            because it has more than `MAX_REAL_RUN_BYTES` of parameters, is on the meta device, or the device type has
            no device here.
        WrapError: the model is wrapped already.
    """
    _check_target(model, dtype, device_type)
    if not args and not kwargs:
        args, kwargs = example_arguments(model)
    register_ops(autocast_ops, device_type)
    tracer = _Tracer(model, args, kwargs or {}, dtype, device_type, frozenset(autocast_ops))
    recorder = tracer.run()
    records = recorder.records
    found = recorder.safety()
    _refuse_dtype_reads(tracer, recorder, found)
    if not tracer.fake:
        _accept_untraced_experts(model, recorder, found)
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
    if device_type == "cpu" or (device_type == "cuda" and _is_built_for_cuda()):
        return
    try:
        is_usable = bool(torch.get_device_module(device_type).is_available())
    except (RuntimeError, AttributeError):
        is_usable = False
    if not is_usable:
        raise ConfigError(
            describe(
                "device_type",
                f"{device_type!r}, which this torch ({torch.__version__}) cannot use here",
                '"cpu", the type of an accelerator that is here, or "cuda" with a torch that is built for CUDA',
                "Autocast casts other ops on other device types. Trace where the model will run, or name classes.",
            )
        )


def _is_built_for_cuda() -> bool:
    return bool(torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]


class _Tracer:
    """Runs the model on fake tensors, or on real copies if fake tensors fail."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        dtype: torch.dtype,
        device_type: str,
        ops: frozenset[str],
    ) -> None:
        self.fake = True
        self._model = model
        self._inputs = args, kwargs
        self.dtype = dtype
        self._device_type = device_type
        self._ops = ops

    def run(self) -> UseRecorder:
        """Run the model with its own dtypes; return the record."""
        try:
            return self.rerun(())
        # Any exception: fake tensors have no single class of error for "this needs a value".
        except Exception as error:
            self._check_real_run(error)
            logger.info("%s is run for real, on a copy: fake tensors fail with %s", type(self._model).__name__, error)
        self.fake = False
        return self.rerun(())

    def rerun(self, low: Collection[str]) -> UseRecorder:
        """Run the model with the parameters named in `low` in the low dtype; return the record."""
        args, kwargs = self._inputs
        options: dict[str, Any] = {"device_type": self._device_type, "fake": self.fake, "ops": self._ops}
        return record_run(self._model, args, kwargs, dtype=self.dtype, low=low, **options)

    def _check_real_run(self, error: Exception) -> None:
        tensors = [*self._model.parameters(), *self._model.buffers(), *tensors_in(self._inputs)]
        num_bytes = sum(parameter.numel() * parameter.itemsize for parameter in self._model.parameters())
        obstacles = {
            "it is on the meta device": any(tensor.is_meta for tensor in tensors),
            f"its parameters are {num_bytes / 1024**3:.1f} GiB": num_bytes > MAX_REAL_RUN_BYTES,
            f"there is no {self._device_type!r} here": not can_run_backward(self._device_type),
        }
        if not any(obstacles.values()):
            return
        message = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f'{KEY} "auto" cannot trace {type(self._model).__name__}. Fake tensors cannot run it '
            f"({type(error).__name__}: {message}), and it cannot be run for real: "
            f"{', '.join(obstacle for obstacle, is_there in obstacles.items() if is_there)}. Check that the inputs "
            f"fit, trace a configuration of at most {MAX_REAL_RUN_BYTES / 1024**3:g} GiB on the device, or name module "
            "classes instead."
        ) from error


def _refuse_dtype_reads(tracer: _Tracer, recorder: UseRecorder, found: dict[str, tuple[bool, str]]) -> None:
    """Mark parameters as not safe if the model reads their dtype, and runs other ops with the low dtype.

    The model is run a second time with these parameters in the low dtype. It must run the same program.
    """
    readers = {
        name: record.dtype_read_in
        for name, record in recorder.records.items()
        if found[name][0] and record.dtype_read_in is not None and stored_dtype(record.parameter) != tracer.dtype
    }
    if not readers:
        return
    change = _changed_program(tracer, recorder, readers)
    if change is not None:
        for name, place in readers.items():
            found[name] = False, f"not safe: its dtype is read in {place}, and another dtype changes {change}"


def _changed_program(tracer: _Tracer, recorder: UseRecorder, low: Collection[str]) -> str | None:
    if not recorder.has_run_backward:
        return "the program in a way that only a backward could show"
    try:
        program = tracer.rerun(low).program
    except Exception as error:
        return f"the program: {type(error).__name__}"
    pairs = zip_longest(recorder.program, program, fillvalue="nothing")
    return next((f"{old} into {new}" for old, new in pairs if old != new), None)


def _accept_untraced_experts(model: nn.Module, recorder: UseRecorder, found: dict[str, tuple[bool, str]]) -> None:
    """Mark parameters of experts that the inputs did not reach as safe, if those of all their traced copies are."""
    for fqn, copies in untraced_experts(model, recorder.modules_called):
        for name, _ in model.get_submodule(fqn).named_parameters():
            full = f"{fqn}.{name}"
            record = recorder.records.get(full)
            if record is None or record.reads or record.casts:
                continue  # tied to a parameter that was used
            if copies and all(found.get(f"{copy}.{name}", (False, ""))[0] for copy in copies):
                found[full] = True, f"safe: not reached by the example inputs, but the same code as {copies[0]}"


def _aliases(model: nn.Module) -> dict[str, str]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: f" (tied: {', '.join(others)})" if others else "" for first, *others in names.values()}


_SIMPLE = (bool, int, float, str, torch.dtype, type(None))


def untraced_experts(model: nn.Module, called: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (FQN of a child that was not called, FQNs of its copies that were), for the children of a list or dict.

    `called` are FQNs of modules that ran. Copies are children of the same `nn.ModuleList` or `nn.ModuleDict` whose
    forward is the same code over the same shapes: they and all modules inside have equal classes, plain attributes,
    parameters and buffers. The values of the inputs decide which of the children the container's owner calls.
    """
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        children = {f"{fqn}.{name}" if fqn else name: child for name, child in module.named_children()}
        for name, child in children.items():
            if not any(inner == name or inner.startswith(f"{name}.") for inner in called):
                signature = _signature(child)
                yield name, [copy for copy in children if copy in called and _signature(children[copy]) == signature]


def _signature(module: nn.Module) -> list[object]:
    return [_own_signature(fqn, inner) for fqn, inner in module.named_modules()]


def _own_signature(fqn: str, module: nn.Module) -> tuple[object, ...]:
    attributes = vars(module)
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return (
        fqn,
        type(module),
        # A forward that was patched on an instance is equal to itself only.
        id(module) if "forward" in attributes else None,
        {name: value if isinstance(value, _SIMPLE) else type(value) for name, value in attributes.items()},
        [len(value) for value in attributes.values() if isinstance(value, dict)],  # hooks, above all
        [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors],
    )
