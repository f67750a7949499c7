"""Writes the checkpoint of this folder, and beside it how training went on after it was saved.

    PYTHONPATH=. torchrun --nproc-per-node 2 tests/data/checkpoints/make.py

`step_00000003` was written by the version that introduced format 2, `expected.pt` by an earlier one. Files of this
format (`zeroamp.checkpoint.manifest.FORMAT`) must stay loadable: do not write them again with a later version.
"""

import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import zeroamp

HERE = Path(__file__).parent
CONFIG = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 3},
    "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 2},
}
NUM_STEPS = 3
"""Before the save, and again after it."""
WIDTH = 5


class Mix(nn.Module):
    """A product with a matrix, summed by torch's own kernels: those of BLAS differ between processors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.float().mean(0), 0.1)  # differs between ranks
        return self.dropout((x[:, None, :] * self.weight).sum(-1)) + x


class Small(nn.Module):
    """Two units, a frozen parameter, and weights of fewer rows than two ranks divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.ModuleList(Mix() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale + self.shift
        for mix in self.mixes:
            x = mix(x)
        return x.float().square().mean()


def start(seed: int) -> zeroamp.TrainStep:
    """Return a step around a new model, optimizer and scheduler; seeds all random generators of this rank."""
    torch.manual_seed(seed)
    model = zeroamp.wrap_model(Small(), zeroamp.policy_from_config(CONFIG), None, {"Mix"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed_random in (torch.manual_seed, random.seed, np.random.seed):
        seed_random(100 * seed + dist.get_rank())
    return zeroamp.TrainStep(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9))


def go_on(train: zeroamp.TrainStep, first: int) -> list[tuple[float, ...]]:
    """Take `NUM_STEPS` steps. Returns of each: losses, norm, loss scale, learning rate, drawn random numbers."""
    log = []
    for index in range(first, first + NUM_STEPS):
        losses = []
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * index + 10 * micro + dist.get_rank())
            loss = train.model(torch.randn(3, WIDTH, generator=generator))
            losses.append(float(loss.detach()))
            train.backward(loss)
            report = train.step()
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        log.append((*losses, report.grad_norm, report.loss_scale, train.optimizers[0].param_groups[0]["lr"], *drawn))
    return log


def state(train: zeroamp.TrainStep) -> dict[str, torch.Tensor]:
    """Return parameters, the optimizer's tensors and buffers, whole, by name."""
    tensors = dict(train.model.named_parameters())
    for name, parameter in train.model.named_parameters():
        tensors |= {f"{name}.{key}": value for key, value in train.optimizers[0].state.get(parameter, {}).items()}
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in tensors.items()}
    return {name: value.detach().clone() for name, value in (whole | dict(train.model.named_buffers())).items()}


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train = start(seed=0)
    go_on(train, 0)
    zeroamp.save_checkpoint(HERE, train.model, train, extra={"rank": dist.get_rank()})
    expected = [None, None]
    own = {"saved": state(train), "log": go_on(train, NUM_STEPS), "after": state(train)}
    dist.all_gather_object(expected, own)
    if dist.get_rank() == 0:
        facts = {"torch": str(torch.__version__), "cpu": torch.backends.cpu.get_cpu_capability()}
        torch.save({**facts, "ranks": expected}, HERE / "expected.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
