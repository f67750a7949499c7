"""`WrapState`: what `wrap_model` made for a model: plan, meshes, groups, listeners. What changes is in `StepState`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.fsdp import release
from zeroamp.hooks.callers_containers import CallersContainers
from zeroamp.hooks.collectives.collective_calls import IssuedInStep
from zeroamp.hooks.collectives.gradient_reduction import ReceiveBuffers
from zeroamp.hooks.collectives.traffic import CollectiveListener, Traffic
from zeroamp.hooks.group_gradients import GroupGradients
from zeroamp.hooks.module_changes import ModuleChanges
from zeroamp.hooks.root_forward import RootForward
from zeroamp.planning.mesh_axes import MeshAxes
from zeroamp.planning.plan import Plan
from zeroamp.policies.errors import WrapError
from zeroamp.policies.extensions import Extension
from zeroamp.wrapping.step_state import StepState

if TYPE_CHECKING:
    from zeroamp.training.callbacks import Callback
    from zeroamp.two_level.nodes import Nodes

_ATTRIBUTE = "_zeroamp_state"
_roots: "WeakKeyDictionary[nn.Module, None]" = WeakKeyDictionary()
"""The wrapped models of this process. A WeakSet has another order on each rank."""
_unwrapped: "WeakSet[nn.Module]" = WeakSet()
"""The models that were unwrapped, for errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshNodes:
    """The two levels of the axes of a mesh. By default all axes have one level."""

    by_axis: Mapping[int, "Nodes"] = field(default_factory=dict)
    """Axis -> its two levels. At most one axis has two levels."""
    why_flat: str | None = None
    """Why an axis that spans nodes has one level. None if there is no such axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrapState:
    """What `wrap_model` made for a model. `TrainStep`, checkpoints and reports read it."""

    root: nn.Module
    plan: Plan
    mesh: DeviceMesh
    """The ranks over which FSDP2 shards, and over which gradients are averaged: `axes.fsdp`."""
    axes: MeshAxes
    """All axes of the mesh."""
    world: dist.ProcessGroup | None
    """A process group of all ranks of `axes.whole`; None is the default group."""
    nodes: MeshNodes = field(default_factory=MeshNodes)
    """The two levels of the mesh's axes that span nodes."""
    extensions: tuple[Extension, ...]
    """What keys of the config add from packages outside of the core."""
    holders: Mapping[str, FSDPModule]
    """Name of a group -> its group holder, for the groups that are not a unit's own."""
    units: Mapping[str, nn.Module]
    """FQN in the plan -> the FSDP unit's module, the root first. A wrapper that is put around a unit later changes the
    FQN of the module, but not this."""
    containers: CallersContainers
    """The lists and dicts that units received, in the forwards that are running."""
    gradients: Sequence[GroupGradients]
    """One entry per parameter group of FSDP2."""
    traffic: Traffic
    """Counters of the collectives' calls and bytes."""
    issued: IssuedInStep
    """The order of this rank's collectives, by which ranks are compared."""
    listeners: list[CollectiveListener]
    """Called after each collective that this rank issues, `traffic` first; `issued` only if there are several ranks."""
    step: StepState
    """The current optimizer step."""
    changes: ModuleChanges
    """What zeroamp and FSDP2 have changed on the modules, which `unwrap_model` undoes."""
    buffers: ReceiveBuffers = field(default_factory=ReceiveBuffers)
    """The receive buffers that all groups share."""
    root_forward: RootForward = field(default_factory=RootForward)
    """The context managers around the root's forward."""
    replica_switches: list[Callable[[bool], None]] = field(default_factory=list)
    """One per group whose replicas are summed in the last micro-batch only. Called before each backward: True if that
    backward is the last of its optimizer step."""
    set_by_caller: dict[str, str] = field(default_factory=dict)
    """FSDP2's setters by which the caller changed what `TrainStep` reads or sets: see `fsdp_methods.py`."""
    callbacks: "list[Callback]" = field(default_factory=list)
    """The callbacks of all `TrainStep`s of the model, called before those of each."""


def record_state(model: nn.Module, state: WrapState) -> None:
    """Set `state` on the wrapped root."""
    show_state(model, state)
    _roots[model] = None
    _unwrapped.discard(model)


def show_state(model: nn.Module, state: WrapState) -> None:
    """Let `wrap_state` return `state`, without counting the model among the wrapped models of this process."""
    setattr(model, _ATTRIBUTE, state)


def wrap_state(model: nn.Module) -> WrapState:
    """Return the state that `wrap_model` recorded on `model`.

    Raises:
        WrapError: `model` is not a wrapped root.
    """
    state = getattr(model, _ATTRIBUTE, None)
    if not isinstance(state, WrapState):
        done = "is not wrapped any more since unwrap_model" if model in _unwrapped else "is not wrapped"
        why = state or f"{done}. Call zeroamp.wrap_model first, and pass what it returned."
        raise WrapError(f"The model (a {type(model).__name__}) {why}")
    return state


def refuse_part(state: WrapState, call: str, remedy: str) -> None:
    """Raise WrapError if the model is one part of a pipeline, or several, which `call` does not support."""
    if (stages := state.axes.stages) is not None:
        raise WrapError(
            f"{call} got a part of a pipeline of {stages.size()} ranks, which it does not support. {remedy} "
            "See docs/pipelines.md."
        )


def refuse_single_part(state: WrapState, call: str) -> None:
    """Raise WrapError if the model is one part of a pipeline, and not `PipelineStep.model`, which `call` supports."""
    if not state.axes.is_joined:
        refuse_part(state, call, "Build a zeroamp.PipelineStep of all parts, and pass its `model`.")


def refuse_joined(state: WrapState, call: str) -> None:
    """Raise WrapError if the model is `PipelineStep.model`, all parts of a rank, which `call` does not support."""
    if state.axes.is_joined:
        raise WrapError(f"{call} got PipelineStep.model, all parts of this rank. Call it for each part.")


def models_of(state: WrapState) -> list[nn.Module]:
    """Return the models that `wrap_model` returned: the model, or, of `PipelineStep.model`, all parts of this rank."""
    return list(cast(nn.ModuleList, state.root.parts)) if state.axes.is_joined else [state.root]


def hide_state(model: nn.Module, why: str) -> None:
    """Let `wrap_state` raise WrapError with the end of a sentence about the model, until `record_state`."""
    setattr(model, _ATTRIBUTE, why)


def forget_state(model: nn.Module) -> None:
    """Remove the state from a root that was unwrapped."""
    for module in model.modules():  # a compiled root has handed it on to the module inside
        vars(module).pop(_ATTRIBUTE, None)
    del _roots[model]
    _unwrapped.add(model)


def wrapped_models(*, with_hidden: bool = False) -> list[nn.Module]:
    """Return the wrapped models of this process, in the order of their wraps, with those of `hide_state` if asked."""
    return [root for root in _roots if with_hidden or is_wrapped(root)]


def is_wrapped(model: nn.Module) -> bool:
    """Return whether `zeroamp.wrap_model` has wrapped a model as its root."""
    return isinstance(getattr(model, _ATTRIBUTE, None), WrapState)


def autocast_of(state: WrapState) -> AbstractContextManager[object]:
    """Return the context manager of the config's autocast, which the forward uses; in other modes a null context."""
    policy = state.plan.policy
    if policy.mode != "autocast":
        return nullcontext()
    return torch.autocast(state.mesh.device_type, dtype=policy.param_dtype)


def reshard(modules: Iterable[nn.Module]) -> None:
    """Reshard the FSDP2 modules among `modules`. An evaluation may have left them unsharded."""
    for module in modules:
        if isinstance(module, FSDPModule):
            release(module)
