"""Error of losses and gradients with weights in float8, in bf16 and with torchao's float8 products, against fp32.

    python -m benchmarks.float8_error

Two gloo ranks. Prints two tables: the gradients of one step from the same weights, and the losses of a training run.
The second table leaves torchao's products out: on a CPU torchao emulates them, which takes minutes per row.
"""

import statistics

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

import zeroamp
from benchmarks.peers.model import SHAPES, Decoder
from tests.processes.ranks import Ranks
from tests.processes.training import full_parameters

SHAPE = SHAPES["3.7m"]
SEQ, ROWS = 128, 4
NUM_STEPS, NUM_LAST = 60, 10
SEEDS = (0, 1, 2)
BF16 = {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
FLOAT8 = {"zeroamp": {"param_gather_dtype": "float8_e4m3fn"}}
WAYS = {
    "fp32": {},
    "bf16": BF16,
    "bf16, weights in float8": {**BF16, **FLOAT8},
    "bf16, torchao's float8 products": {**BF16, **FLOAT8},
    "autocast bf16": AUTOCAST,
    "autocast bf16, weights in float8": {**AUTOCAST, **FLOAT8},
}


def _batch(index: int, seed: int) -> torch.Tensor:
    """Return tokens that a model can learn: each row counts up or down from some token in steps of 1 to 8."""
    generator = torch.Generator().manual_seed(10_000 * seed + 2 * index + dist.get_rank())
    start = torch.randint(0, SHAPE.vocab, (ROWS, 1), generator=generator)
    step = torch.randint(-8, 9, (ROWS, 1), generator=generator)
    return (start + step * torch.arange(SEQ)) % SHAPE.vocab


def _wrapped(way: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Decoder(SHAPE, SEQ)
    if "torchao" in way:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    return zeroamp.wrap_model(model, zeroamp.policy_from_config({**WAYS[way], "zero_optimization": {"stage": 3}}))


def gradients(way: str, seed: int) -> tuple[float, torch.Tensor]:
    """Return the loss and all gradients of the first step, whole, as one fp32 tensor."""
    model = _wrapped(way, seed)
    loss = model(_batch(0, seed))
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])


def losses(way: str, seed: int) -> list[float]:
    """Train; return the mean loss over ranks of each step, and check that whole weights are fp32."""
    model = _wrapped(way, seed)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    found = []
    for index in range(NUM_STEPS):
        train.backward(model(_batch(index, seed)))
        found.append(train.step().loss)
    assert {parameter.dtype for parameter in full_parameters(model).values()} == {torch.float32}
    return found


def main() -> None:
    """Print both tables."""
    print(f"torch {torch.__version__}, torchao {__import__('torchao').__version__}\n")
    ranks = Ranks(2)
    first = {(way, seed): ranks.run(gradients, way, seed)[0] for way in WAYS for seed in SEEDS}
    rows = []
    for way in WAYS:
        errors = []
        for seed in SEEDS:
            (_, exact), (_, got) = first["fp32", seed], first[way, seed]
            errors.append(float((got - exact).norm() / exact.norm()))
        of_loss = [abs(first[way, seed][0] - first["fp32", seed][0]) for seed in SEEDS]
        rows.append([way, *(f"{error:.2e}" for error in errors), f"{max(of_loss):.1e}"])
    print(tabulate(rows, headers=["gradient of step 1", *(f"seed {s}" for s in SEEDS), "largest error of the loss"]))
    rows = []
    for way in (way for way in WAYS if "torchao" not in way):
        means = [statistics.mean(ranks.run(losses, way, seed)[0][-NUM_LAST:]) for seed in SEEDS]
        rows.append([way, *(f"{mean:.4f}" for mean in means), f"{statistics.mean(means):.4f}"])
        print(rows[-1], flush=True)
    print("\n" + tabulate(rows, headers=[f"loss, mean of the last {NUM_LAST} steps", *map(str, SEEDS), "mean"]))
    ranks.stop()


if __name__ == "__main__":
    main()
