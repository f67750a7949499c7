"""What `wrap_model` leaves on a model for the step and the reports."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from zeroamp.checkpoint.background import Saving
from zeroamp.hooks._torch.fsdp import release
from zeroamp.hooks.collectives.accumulation import ShardAccumulator
from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.hooks.guards import BackwardGuard
from zeroamp.hooks.observers.communication import CommunicationWatch
from zeroamp.hooks.observers.ranges import Ranges
from zeroamp.hooks.precision.autocast import AutocastHook
from zeroamp.hooks.precision.fp32_regions import Fp32Region
from zeroamp.hooks.precision.outer_autocast import OuterAutocastGuard
from zeroamp.hooks.reshard_after_no_grad import ReshardAfterEvaluation
from zeroamp.planning.plan import Plan
from zeroamp.policies.errors import WrapError, describe
from zeroamp.recovery.call_log import CallLog
from zeroamp.recovery.forward_watch import ForwardWatch
from zeroamp.wrapping.rank_group import RankGroup

_ATTRIBUTE = "_zeroamp_state"


@dataclass(kw_only=True, slots=True)
class WrapState:
    """What `wrap_model` attached to a model; the step and the reports read it."""

    root: nn.Module
    plan: Plan
    mesh: DeviceMesh
    traffic: Traffic
    """What the collectives moved since it was last reset."""
    ranges: Ranges = field(default_factory=Ranges)
    """Names what runs in traces."""
    holders: dict[str, FSDPModule] = field(default_factory=dict)
    """Group name -> holder, for the groups that are not a unit's own."""
    calls: CallLog = field(default_factory=CallLog)
    """The collectives of this window, on this rank."""
    watch: ForwardWatch = field(init=False)
    communication: CommunicationWatch = field(init=False)
    autocast: AutocastHook | None = None
    evaluation: ReshardAfterEvaluation = field(default_factory=ReshardAfterEvaluation)
    outer_autocast: OuterAutocastGuard | None = None
    guard: BackwardGuard | None = None
    fp32_regions: list[Fp32Region] = field(default_factory=list)
    shard_accumulator: ShardAccumulator | None = None
    handles: list[RemovableHandle] = field(default_factory=list)
    is_rehearsing: bool = False
    """Whether what runs is a window that leaves no trace, see `zeroamp.ledger.observed_step`."""
    saving: Saving = field(default_factory=Saving)

    def __post_init__(self) -> None:
        self.watch = ForwardWatch(self.calls)
        self.communication = CommunicationWatch(self.root)


def record_state(model: nn.Module, state: WrapState) -> None:
    """Leave `state` on the wrapped root."""
    setattr(model, _ATTRIBUTE, state)


def wrap_state(model: nn.Module) -> WrapState:
    """Return what `wrap_model` recorded on `model`.

    Raises:
        WrapError: `model` is not a wrapped root.
    """
    state = getattr(model, _ATTRIBUTE, None)
    if not isinstance(state, WrapState):
        raise WrapError(
            describe(
                "model", f"a {type(model).__name__} that is not wrapped", "what wrap_model returned", "Wrap it first."
            )
        )
    return state


def signals_of(state: WrapState) -> RankGroup:
    """Return the ranks' group for flags and reports of the main thread."""
    return RankGroup.for_signals(state.mesh)


def reshard(modules: Iterable[nn.Module]) -> None:
    """Put the sharded parameters back into FSDP2's modules among these; an evaluation may have left them gathered."""
    for module in modules:
        if isinstance(module, FSDPModule):
            release(module)
