"""What ranks run in the tests of the engine."""

import torch
import torch.distributed as dist

import zeroamp.deepspeed as deepspeed
from tests.models.small import batch, build, loss_of
from tests.processes.training import Run, full_parameters


def config(stage, *, accumulation=1, clip=0.0, dtype="bfloat16", **more):
    cfg = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        **more,
    }
    return cfg if dtype is None else {**cfg, "torch_autocast": {"enabled": True, "dtype": dtype}}


def start(name, cfg, *, lr=1e-2, schedule=None):
    """An engine with an optimizer that was built before, as scripts do."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=cfg, lr_scheduler=schedule)[0]


def train(name, cfg, num_steps, *, first=0, engine=None):
    """Train with a step() after each backward, as DeepSpeed's scripts do."""
    engine = engine or start(name, cfg)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    accumulation = engine.gradient_accumulation_steps()
    losses, norms, means = [], [], []
    for index in range(first, first + num_steps):
        losses.append([])
        for micro in range(accumulation):
            loss = loss_of(engine, batch(name, (index * accumulation + micro) * world_size + rank))
            losses[-1].append(float(loss.detach()))
            assert engine.is_gradient_accumulation_boundary() == (micro + 1 == accumulation)
            divided = engine.backward(loss)
            assert torch.equal(divided, loss.detach() / accumulation)
            engine.step()
            assert engine.was_step_applied() == (micro + 1 == accumulation)
        norms.append(engine.get_global_grad_norm())
        means.append(engine.report.loss)
    return Run(losses=losses, norms=norms, parameters=full_parameters(engine.module), mean_losses=means)


def by_boundary(name, cfg, counts, *, in_no_sync=False):
    """Train with optimizer steps of different numbers of micro-batches, and one step() at the end of each."""
    engine = start(name, cfg)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses, norms, done = [], [], 0
    for count in counts:
        losses.append([])
        for micro in range(count):
            is_last = micro + 1 == count
            inputs = batch(name, done * world_size + rank)
            done += 1
            if in_no_sync and not is_last:
                with engine.no_sync():
                    losses[-1].append(_backward(engine, inputs, count))
            else:
                if not in_no_sync:
                    engine.set_gradient_accumulation_boundary(is_last)
                losses[-1].append(_backward(engine, inputs, count))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert engine.global_steps == len(counts)
    return Run(losses=losses, norms=norms, parameters=full_parameters(engine.module), mean_losses=[])


def _backward(engine, inputs, count):
    loss = loss_of(engine, inputs)
    engine.backward(loss.float() / count, scale_wrt_gas=False)
    return float(loss.detach())
