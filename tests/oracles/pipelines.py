"""One process without a pipeline: each micro-batch of each data rank alone, added in fp32 in their order."""

import copy
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    losses: list
    """[step][data rank][micro-batch]."""
    norms: list
    """[step], before clipping."""
    parameters: dict
    """At the end."""


def train(model, samples, loss_of, *, num_steps, num_data, num_micro_batches, mode, max_norm, lr, loss_scale=1.0,
          accumulate=torch.float32):  # fmt: skip
    """Train with SGD. `mode`: "fp32", "bf16", "fp16" (the model is cast), or "autocast". `samples(step, data_rank)`.

    `accumulate`: the dtype of the sum over micro-batches, which is rounded after each addition.
    """
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses, norms = [], []
    for step in range(num_steps):
        losses.append([])
        sums = []
        for data_rank in range(num_data):
            losses[-1].append([])
            sums.append([])
            inputs, targets = (each.chunk(num_micro_batches) for each in samples(step, data_rank))
            for of_micro_batch, target in zip(inputs, targets, strict=True):
                computed = copy.deepcopy(model).to(low) if low is not None else model
                with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                    output = computed(of_micro_batch)
                loss = loss_of(output, target)
                scaled = torch.autograd.grad(loss * loss_scale, list(computed.parameters()))
                before = sums[-1] or [torch.zeros_like(each) for each in scaled]
                sums[-1] = [(a.float() + b.float()).to(accumulate) for a, b in zip(before, scaled, strict=True)]
                losses[-1][-1].append(loss.item())
        for parameter, *of_ranks in zip(model.parameters(), *sums, strict=True):
            parameter.grad = sum(each.float() for each in of_ranks) / num_data / num_micro_batches / loss_scale
        norm = torch.stack([each.grad.double().square().sum() for each in model.parameters()]).sum().sqrt()
        norms.append(norm.item())
        for parameter in model.parameters():
            parameter.grad.mul_((max_norm / (norm.float() + 1e-6)).clamp(max=1.0))
        optimizer.step()
    return PipelineRun(losses=losses, norms=norms, parameters={n: p.detach() for n, p in model.named_parameters()})
