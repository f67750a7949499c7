"""`sleep` and `wake`: move the state of a training to host memory and back, between two optimizer steps."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.fsdp import flat_shards
from zeroamp.hooks.tensors import tensors_in
from zeroamp.host_memory.storages import HostCopies, restore
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import StepError
from zeroamp.wrapping.optimizer_hooks import refuse_steps
from zeroamp.wrapping.state import WrapState, hide_state, record_state, refuse_joined, reshard, wrap_state

logger = logging.getLogger("zeroamp")

Part = Literal["params", "grads", "optimizer"]
PARTS: tuple[Part, ...] = ("params", "grads", "optimizer")
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass
class _Sleep:
    """What sleeps of one model."""

    state: WrapState
    copies: dict[Part, HostCopies] = field(default_factory=dict)
    handles: dict[Part, list[RemovableHandle]] = field(default_factory=dict)


_ATTRIBUTE = "_zeroamp_sleep"
"""The attribute of a model that holds its `_Sleep`, which refers to the model: nothing else may."""


def sleep(model: nn.Module, optimizers: Optimizers = (), what: Sequence[Part] = PARTS) -> None:
    """Move parts of a training's state to host memory, pinned on accelerators, and free their device memory.

    Call it on every rank, between two optimizer steps. Communicates nothing. The model's buffers stay on the device.
    The receive buffers of the reductions are released until the next backward. Until `wake`, a forward, an optimizer
    step, a save and an export are errors. Other reads and writes use host memory. Shards that the config offloads stay
    where they are. If host memory is full, nothing sleeps.

    Args:
        model: that `wrap_model` returned.
        optimizers: of the model's parameters: one, several, or `TrainStep.optimizers`.
        what: "params": the sharded parameters. "grads": gradients that have not been discarded. "optimizer": the state
            of `optimizers`. They can sleep and wake one by one, in any order.

    Raises:
        StepError: inside an optimizer step, a part of `what` is unknown or sleeps already, or `optimizers` has
            something else, such as a TrainStep.
        WrapError: the model is not wrapped.
    """
    asleep: _Sleep | None = getattr(model, _ATTRIBUTE, None)
    if asleep is None or not {"params", "grads"} & asleep.copies.keys():
        state = wrap_state(model)  # raises while the weights are read
        refuse_joined(state, "sleep")
        asleep = asleep or _Sleep(state)
    state = asleep.state
    given = [*optimizers] if isinstance(optimizers, Iterable) else [optimizers]
    if wrong := [type(each).__name__ for each in given if not isinstance(each, torch.optim.Optimizer)]:
        raise StepError(f"sleep(optimizers=) must be optimizers, but contains a {wrong[0]}. Pass train.optimizers.")
    _refuse_parts("sleep", what, lambda part: part in asleep.copies, "asleep already. Call wake first")
    if state.step.is_open:
        raise StepError(f"zeroamp.sleep was called {state.step.phase.value}. Call it between two optimizer steps.")
    reshard(state.units.values())  # an evaluation may have left units unsharded
    parameters = list(model.parameters())
    tensors: dict[Part, list[torch.Tensor]] = {
        "params": [*parameters, *flat_shards(state.root)],
        "grads": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer": list(tensors_in([optimizer.state for optimizer in given])),
    }
    copies = {part: HostCopies(tensors[part], device_of(state.mesh)) for part in what}  # all, or the model stays awake
    del tensors, parameters
    for part in what:
        asleep.handles[part] = list(_guards(part, state, given))
        if part != "optimizer":
            hide_state(model, f"is asleep: its {part} are in host memory. Call zeroamp.wake(model) first.")
    asleep.copies.update(copies)
    setattr(model, _ATTRIBUTE, asleep)
    for part, each in copies.items():
        each.free()
        if each.is_on_device():
            logger.warning(
                "zeroamp.sleep: device memory of %s is not freed, because views of it exist, such as a state_dict() or "
                "the result of to_local(). Delete them before.",
                part,
            )
    state.buffers.discard()
    if state.mesh.device_type != "cpu":
        torch.get_device_module(state.mesh.device_type).empty_cache()  # other processes and libraries need the memory


def wake(model: nn.Module, what: Sequence[Part] | None = None) -> None:
    """Move what `sleep` moved back to the device. The bits are those before. Call it on every rank.

    If it raises, because the device's memory is full, nothing has moved: free memory, and call it again.

    Args:
        model: that was given to `sleep`.
        what: the parts to move. None: all that sleep.

    Raises:
        StepError: a part of `what` is unknown or does not sleep.
    """
    asleep: _Sleep | None = getattr(model, _ATTRIBUTE, None)
    copies = {} if asleep is None else asleep.copies
    parts = tuple(copies) if what is None else what
    _refuse_parts("wake", parts, lambda part: part not in copies, "awake already")
    restore([copies[part] for part in parts])
    for part in parts:
        del copies[part]
        for handle in [] if asleep is None else asleep.handles.pop(part):
            handle.remove()
    if asleep is not None and {"params", "grads"} & set(parts) and not {"params", "grads"} & copies.keys():
        record_state(model, asleep.state)
    if asleep is not None and not copies:
        delattr(model, _ATTRIBUTE)


def _refuse_parts(method: str, what: Sequence[Part], is_wrong: Callable[[Part], bool], why: str) -> None:
    """Raise StepError for a part that is unknown, or for which `is_wrong` is true."""
    unknown = [part for part in what if part not in PARTS]
    if isinstance(what, str) or unknown:
        raise StepError(f"zeroamp.{method}(what=) must be a list of {', '.join(PARTS)}, but is {what!r}.")
    if wrong := [part for part in what if is_wrong(part)]:
        raise StepError(f"zeroamp.{method} was called for {' and '.join(wrong)}, which is {why}.")


def _guards(part: Part, state: WrapState, optimizers: Iterable[torch.optim.Optimizer]) -> Iterable[RemovableHandle]:
    """Register hooks that raise StepError where freed memory would be read. Yields their handles."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        what = "the state of its optimizers is" if part == "optimizer" else f"its {part} are"
        raise StepError(f"The model is asleep: {what} in host memory. Call zeroamp.wake(model) first.")

    if part == "optimizer":
        for optimizer in optimizers:
            yield optimizer.register_step_pre_hook(refuse)
            # Before the hook that brings offloaded state to the device.
            yield optimizer.register_state_dict_pre_hook(refuse, prepend=True)
            yield optimizer.register_load_state_dict_pre_hook(refuse, prepend=True)
        return
    for unit in state.units.values():
        yield unit.register_forward_pre_hook(refuse, prepend=True)
    yield refuse_steps(state.root, refuse)  # of all optimizers: the caller need not have named them
    if part == "params":
        yield state.root.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
