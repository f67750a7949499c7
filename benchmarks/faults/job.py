"""The training that faults are injected into: a small model, with all kinds of state that a checkpoint must restore.

Dropout (torch's generator), a factor from Python's generator and one from NumPy's, a buffer that differs between ranks,
AdamW, a learning rate schedule, gradient accumulation, and the position in the data as `extra`.
"""

import hashlib
import json
import logging
import os
import random
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zeroamp
from benchmarks.faults.moments import Moments

EXPORT = "export"
"""Name of the folder of the export, beside the folder of the checkpoints."""
_WIDTH, _BATCH = 24, 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """One way to train and save."""

    stage: int
    accumulation: int
    num_ranks: int = 2
    num_steps: int = 6
    save_every: int = 1
    """Optimizer steps between two saves. The last step is saved too. 0: never."""
    async_: bool = False
    keep: int | None = None
    goes_on: bool = False
    """Whether training continues after a failed save, which removes the file `ballast` from the folder."""
    handles_sigterm: bool = False
    """Whether SIGTERM causes a last save (`zeroamp.Preemption`) instead of ending the rank."""
    logs_state: bool = False
    """Whether digests of all parameters and optimizer states are logged at each save and load."""
    exports: bool = False
    """Whether the run ends with an export for `from_pretrained`, beside the folder of the checkpoints."""
    timeout_s: float = 20.0
    """Timeout of every collective."""

    def __str__(self) -> str:
        saves = f"saves every {self.save_every}{' in the background' if self.async_ else ''}"
        keep = "all" if self.keep is None else self.keep
        return f"ranks {self.num_ranks}, stage {self.stage}, accumulation {self.accumulation}, {saves}, keeps {keep}"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 40), nn.Linear(40, _WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(_WIDTH, 7)
        self.register_buffer("mean", torch.zeros(_WIDTH))  # of this rank's inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        y = x - self.mean
        for block in self.blocks:
            y = block(y)
        return nn.functional.cross_entropy(self.head(y).float(), x[:, :7].argmax(1))


class Log:
    """The report of one rank: a file with a JSON object per line, which survives the rank."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def write(self, **entry: Any) -> None:
        """Append one line with one system call, so that a killed process loses no part of it."""
        os.write(self._file, (json.dumps(entry) + "\n").encode())


def run_rank(job: Job, rank: int, init_method: str, folder: Path, log: Log, moments: Moments) -> None:
    """Train to `job.num_steps`, from the newest checkpoint of `folder` if there is one."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    moments.watch_system()
    timeout = timedelta(seconds=job.timeout_s)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=job.num_ranks, timeout=timeout)
    model, train = _prepare(job, rank)
    moments.watch_model(model, train.optimizers[0])
    preemption = zeroamp.Preemption(model) if job.handles_sigterm else None
    with preemption or nullcontext():
        moments.enter("load")
        extra = zeroamp.load_checkpoint(folder, model, train, missing_ok=True)
        position = 0 if extra is None else extra["position"]
        log.write(event="loaded", step=train.num_steps, position=position, state=_state_digest(job, model, train))
        saves = _Saves(job, folder, model, train, log)
        while train.num_steps < job.num_steps:
            moments.begin_step(train.num_steps + 1)
            position = _one_step(rank, position, model, train, log, moments)
            moments.enter("save")
            is_preempted = preemption is not None and preemption.is_requested()
            saves.after_step(position, is_last=is_preempted)
            if is_preempted:
                saves.finish()
                log.write(event="preempted", step=train.num_steps)
                return
        saves.finish()
        if job.exports:
            _export(folder.with_name(EXPORT), model, log, moments)
        moments.enter("end")
        log.write(event="finished", num_steps=train.num_steps, digest=_digest(model))
        dist.destroy_process_group()


def _prepare(job: Job, rank: int) -> tuple[nn.Module, zeroamp.TrainStep]:
    config = {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": job.stage},
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": 1.0,
    }
    torch.manual_seed(0)
    model = zeroamp.wrap_model(_Net(), zeroamp.policy_from_config(config), auto_wrap_policy={"_Block"})
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    return model, zeroamp.TrainStep(model, optimizer, scheduler)


def _one_step(rank: int, position: int, model: nn.Module, train: zeroamp.TrainStep, log: Log, moments: Moments) -> int:
    """Take one optimizer step, log its bits, and return the position in the data after it."""
    losses, report = [], None
    while report is None:
        generator = torch.Generator().manual_seed(position * dist.get_world_size() + rank)
        inputs = torch.randn(_BATCH, _WIDTH, generator=generator) * (1 + random.random() + np.random.rand())
        moments.enter("forward")
        loss = model(inputs)
        losses.append(loss.item().hex())
        moments.enter("backward")
        train.backward(loss)
        moments.enter("step")
        report = train.step()
        position += 1
    log.write(event="step", step=report.step, losses=losses, norm=report.grad_norm.hex())
    return position


@dataclass
class _Saves:
    """Saves by the settings of the job, and logs each completed save."""

    job: Job
    folder: Path
    model: nn.Module
    train: zeroamp.TrainStep
    log: Log
    pending: Future[Path] | None = None

    def after_step(self, position: int, *, is_last: bool) -> None:
        self._look(wait=False)
        step = self.train.num_steps
        is_due = self.job.save_every and not step % self.job.save_every
        if not is_due and not is_last and (not self.job.save_every or step != self.job.num_steps):
            return
        if self.job.logs_state:
            self.log.write(event="state", step=step, state=_state_digest(self.job, self.model, self.train))
        extra, keep = {"position": position}, self.job.keep
        try:
            saved = zeroamp.save_checkpoint(
                self.folder, self.model, self.train, extra=extra, keep=keep, async_=self.job.async_
            )
        except zeroamp.CheckpointError as error:
            if not self.job.goes_on:
                raise
            self.log.write(event="refused", step=step, text=str(error))
            if dist.get_rank() == 0:
                (self.folder / "ballast").unlink()
            dist.barrier()
            return
        if isinstance(saved, Path):
            self.log.write(event="saved", step=step, name=saved.name)
        else:
            self._look(wait=True)  # a second save waited for the first
            self.pending = saved

    def finish(self) -> None:
        self._look(wait=True)

    def _look(self, wait: bool) -> None:
        pending = self.pending
        if pending is None or not (wait or pending.done()):
            return
        # A failed save may have ended on this rank only. A wait raises its error on all ranks in the same step.
        if wait or pending.exception() is None:
            name = pending.result().name
            self.log.write(event="saved", step=int(name.split("_")[1]), name=name)
            self.pending = None


def _export(target: Path, model: nn.Module, log: Log, moments: Moments) -> None:
    """Export the weights. Before that, log the digest of what the file must contain."""
    tensors = {name: _whole(value) for name, value in model.state_dict().items()}  # buffers: the first rank's count
    log.write(event="exporting", digest=tensors_digest({name: value.numpy() for name, value in tensors.items()}))
    moments.enter("export")
    zeroamp.export_hf(model, target)
    log.write(event="exported")


def tensors_digest(arrays: dict[str, np.ndarray]) -> str:
    """Return a digest of arrays by name."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(name.encode() + arrays[name].tobytes())
    return digest.hexdigest()


def _state_digest(job: Job, model: nn.Module, train: zeroamp.TrainStep) -> str | None:
    """Return a digest of whole parameters and optimizer states, equal on all ranks. Resharding must not change it."""
    if not job.logs_state:
        return None
    digest = hashlib.sha256()
    for parameter in model.parameters():
        state = train.optimizers[0].state.get(parameter, {})
        values = (value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor))
        for value in (parameter.detach(), *values):
            digest.update(_whole(value).numpy().tobytes())
    return digest.hexdigest()


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _digest(model: nn.Module) -> str:
    """Return a digest of all whole parameters and of this rank's buffers."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(_whole(value).numpy().tobytes())
    return digest.hexdigest()
