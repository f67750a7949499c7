"""Announces what a rank is doing, and injects faults at chosen moments.

A rank announces every moment at which a fault can be injected: each module's forward and backward, the parts of the
optimizer step, each collective of saving and loading, and each change of the file system, before and after it.
Announcing is a write to memory that is shared with the parent, so the parent can read where a killed rank was.
"""

import functools
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

Phase = Literal["start", "load", "forward", "backward", "step", "save", "publish", "export", "end"]
PASSAGES: dict[Phase, int] = {"load": 19, "forward": 25, "backward": 13, "step": 5, "save": 30, "publish": 35}
"""Phase -> about the smallest number of its moments in any job, in one step, one save or one load."""
NUM_EXPORT_PASSAGES = 24
"""Moments of an export, which not every job has."""
MANIFEST = "zeroamp.json"
_FILE_OPS = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir")
_COLLECTIVES = ("all_reduce", "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list")
_SLOT_BYTES = 256
_TIME = struct.Struct("d")


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A fault for one rank at one of its moments."""

    rank: int
    phase: Phase
    step: int
    """The first step in which it can happen. 0: from the start on."""
    passage: int
    """Number of the phase's moment, counted from 1 from that step on."""
    signal: int = signal.SIGKILL
    """SIGKILL, SIGTERM, or SIGSTOP: a rank that exists, but does nothing any more."""
    torn: float | None = None
    """Fraction of the file that is on the disk when the rank dies, if the moment is before an fsync."""


class Board:
    """Shared memory to which each rank writes what it is doing. The parent reads it when the rank is dead."""

    def __init__(self, num_ranks: int, path: Path | None = None) -> None:
        """Map the memory, shared with forks of this process. With `path`: with all processes that map this file."""
        num_bytes = 2 * num_ranks * _SLOT_BYTES + _TIME.size
        descriptor = -1
        if path is not None:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
            os.ftruncate(descriptor, num_bytes)
        self._memory = mmap.mmap(descriptor, num_bytes)

    def write(self, rank: int, in_background: bool, text: str) -> None:
        """Write what the main thread or the background save of a rank is doing."""
        start = (2 * rank + in_background) * _SLOT_BYTES
        self._memory[start : start + _SLOT_BYTES] = text.encode()[:_SLOT_BYTES].ljust(_SLOT_BYTES, b"\0")

    def note_strike(self) -> None:
        """Write the time at which a rank is struck: now."""
        self._memory[-_TIME.size :] = _TIME.pack(time.monotonic())

    @property
    def struck_s(self) -> float:
        """Time at which a rank was struck last, on the monotonic clock; 0 if none was."""
        return float(_TIME.unpack(self._memory[-_TIME.size :])[0])

    def read(self, rank: int) -> str:
        """Return what a rank was doing last: its main thread, and its background save if there was one."""
        start = 2 * rank * _SLOT_BYTES
        slots = (self._memory[start + i * _SLOT_BYTES : start + (i + 1) * _SLOT_BYTES] for i in range(2))
        return " | in the background: ".join(text for slot in slots if (text := slot.rstrip(b"\0").decode()))


@dataclass
class Moments:
    """Announces the moments of one rank, and strikes it at the moment of `strike`."""

    rank: int
    board: Board
    strike: Strike | None = None
    phase: Phase = "start"
    """Phase of the main thread. The background thread only saves."""
    _step: int = 0
    _num_passages: int = 0
    _is_publishing: bool = False

    def begin_step(self, step: int) -> None:
        """Record that the main thread begins a step."""
        self._step = step

    def enter(self, phase: Phase) -> None:
        """Record and announce that the main thread begins a phase."""
        self.phase = phase
        self.announce("begins")

    def announce(self, label: str, fsynced: int | None = None) -> None:
        """Announce a moment of the current thread. `fsynced`: descriptor of a file that is about to be fsynced."""
        in_background = threading.current_thread() is not threading.main_thread()
        phase = "save" if in_background else self.phase
        if phase == "save" and self._is_publishing:
            phase = "publish"
        self.board.write(self.rank, in_background, f"{phase}: {label}")
        strike = self.strike
        if strike is None or phase != strike.phase or self._step < strike.step:
            return
        self._num_passages += 1
        if self._num_passages == strike.passage:
            if strike.torn is not None and fsynced is not None:
                os.truncate(fsynced, int(os.fstat(fsynced).st_size * strike.torn))
            self.board.note_strike()
            os.kill(os.getpid(), strike.signal)

    def watch_model(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Announce the forward and backward of every module, and the optimizer's step."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(functools.partial(self._before_forward, name))
            module.register_forward_hook(functools.partial(self._after_forward, name))
        optimizer.register_step_pre_hook(lambda *_: self.announce("before optimizer.step"))
        optimizer.register_step_post_hook(lambda *_: self.announce("after optimizer.step"))

    def _before_forward(self, name: str, *_: Any) -> None:
        self.announce(f"before {name or 'the model'}")

    def _after_forward(self, name: str, _module: torch.nn.Module, _args: Any, output: torch.Tensor) -> None:
        self.announce(f"after {name or 'the model'}")
        if output.requires_grad:
            output.register_hook(lambda _: self.announce(f"gradient of {name or 'the loss'}"))

    def watch_system(self) -> None:
        """Announce the collectives and file system changes that this process makes from Python."""
        for name in _COLLECTIVES:
            setattr(dist, name, self._announced(name, getattr(dist, name)))
        for name in _FILE_OPS:
            setattr(os, name, self._announced_file_op(name, getattr(os, name)))

    def _announced(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def announced(*args: Any, **kwargs: Any) -> Any:
            self.announce(f"before {name}")
            result = call(*args, **kwargs)
            self.announce(f"after {name}")
            return result

        return announced

    def _announced_file_op(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def announced(*args: Any, **kwargs: Any) -> Any:
            file = _file_name(args[0])
            self._is_publishing |= name == "fsync" and file == MANIFEST
            self._is_publishing &= name != "mkdir"  # the next draft
            self.announce(f"before {name} of {file}", args[0] if name == "fsync" else None)
            result = call(*args, **kwargs)
            self.announce(f"after {name} of {file}")
            return result

        return announced


def _file_name(file: Any) -> str:
    path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
    return os.path.basename(path)
