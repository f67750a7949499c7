"""Which collectives a rank issued, so that after a failure it can issue those that the others still wait for.

[Note: Keeping one's part]
A collective that one rank leaves out can neither be called off on the others nor be waited for: when it times out, the
process group is lost. So a rank that failed keeps its part: it issues, with zeros, what was left of the window (from
one optimizer step to the next), in the order in which the windows before issued it. The others run their window to its
end, and learn there that it is worth nothing.

That is right for streams of an accelerator too. What pairs the calls of ranks is the order in which each host issues
them on a process group, not the stream they run in. The rest is issued by one thread in one stream, in the recorded
order of the hosts, after FSDP2's own streams were waited for; so its buffers may be used again by the next call.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from zeroamp.hooks._torch.fsdp import all_gather, reduce_scatter
from zeroamp.hooks.collectives.traffic import STEP, Collective, ReduceOp


class Call(NamedTuple):
    """One collective, as this rank issues it."""

    collective: Collective
    group_name: str
    """The typed group's, in the plan."""
    process_group: dist.ProcessGroup
    dtype: torch.dtype
    numel: int
    """Elements of the unsharded tensor: the output of an all-gather, the input of the others."""
    op: ReduceOp = dist.ReduceOp.SUM
    """What a reduction does. No effect on an all-gather or an all-to-all."""

    def __str__(self) -> str:
        return f"{self.collective} of {self.numel} x {self.dtype} for {self.group_name}"


@dataclass(slots=True)
class CallLog:
    """The collectives since the last optimizer step, and those of the window before. Sizes only, no tensors.

    A call is added once it was issued: what raised before is not among them.
    """

    is_on: bool = False
    """Whether calls are added: once there is something that ends windows."""
    window: list[Call] = field(default_factory=list)
    """Of this window so far, without evaluations."""
    last_window: list[Call] | None = None
    """Of the last whole window; None before."""
    is_steady: bool = True
    """Whether the last whole window and the one before it were the same."""
    evaluation: list[Call] | None = None
    """Of the forward without gradients that is running; None outside of one."""
    last_evaluation: list[Call] | None = None

    def on_collective(
        self,
        collective: Collective,
        tensor: torch.Tensor,
        group_name: str,
        process_group: dist.ProcessGroup | None,
        op: ReduceOp,
    ) -> None:
        """Note one call of a parameter group that was issued."""
        if self.is_on and process_group is not None and group_name != STEP:
            calls = self.window if self.evaluation is None else self.evaluation
            calls.append(Call(collective, group_name, process_group, tensor.dtype, tensor.numel(), op))

    def end_window(self) -> None:
        """Keep this window's calls as those of the next."""
        self.is_steady = self.last_window is None or self.last_window == self.window
        self.last_window, self.window = self.window, []

    def end_evaluation(self) -> None:
        """Keep an evaluation's calls as those of the next, unless it ran inside a window, which may have gathered."""
        if not self.window:
            self.last_evaluation = self.evaluation
        self.evaluation = None

    def drop(self) -> None:
        """Forget the calls of a window, or of an evaluation, that does not go on."""
        self.window, self.evaluation = [], None


class ZeroBuffers:
    """What the rest of a window is issued with: as much memory as twice its largest call."""

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        num_bytes = max((call.numel * call.dtype.itemsize for call in calls), default=0)
        self._calls = calls
        self._zeros = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._zeros)

    def issue(self) -> None:
        """Issue all calls, see [Note: Keeping one's part]."""
        for call in self._calls:
            zeros = self._zeros[: call.numel * call.dtype.itemsize].view(call.dtype)
            received = self._received[: call.numel * call.dtype.itemsize].view(call.dtype)
            part = call.numel // call.process_group.size()
            if call.collective == "all_gather":
                all_gather(received, zeros[:part], call.process_group, async_op=False)
            elif call.collective == "reduce_scatter":
                reduce_scatter(received[:part], zeros, call.process_group, call.op)
            elif call.collective == "all_to_all":
                dist.all_to_all_single(received, zeros, group=call.process_group)
            else:
                dist.all_reduce(received.zero_(), op=call.op, group=call.process_group)
