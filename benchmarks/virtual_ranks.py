"""Plays the data-parallel ranks of a LLaMA in one process: the gradient of each rank, and its sum over ranks.

[Note: Gradients of virtual ranks]
One forward and backward runs over the samples of many ranks. It computes no gradient of a weight: hooks retain the
input of each layer and the gradient of its output, and the gradients of all ranks follow from these, layer by layer, by
the operations of autograd, at most BLOCK elements of all ranks at a time. So memory does not grow with the number of
ranks times the number of weights. `benchmarks.loss_curves --check` compares the result with 8 processes.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm

BLOCK = 2**26
"""Elements that are computed at a time, of all ranks: 128 MiB in bf16."""
TOKENS = 2**11
"""Tokens of one forward and backward."""

Sum = Callable[[torch.Tensor], torch.Tensor]
"""Sums gradients [ranks, elements] over ranks; returns [elements]."""


def bf16_ring(rows: torch.Tensor) -> torch.Tensor:
    """Sum as a ring does that adds in bf16: rounded at each hop.

    A real ring starts each chunk at another rank. All chunks start at rank 0 here: which rank holds which samples is
    random, so the error is the same on average.
    """
    rows = rows.bfloat16()
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def bf16_tree(rows: torch.Tensor) -> torch.Tensor:
    """Sum in a balanced binary tree, rounded to bf16 at each level. The number of ranks is a power of two."""
    rows = rows.bfloat16()
    while len(rows) > 1:
        rows = rows[::2] + rows[1::2]
    return rows[0]


def fp32_ring(rows: torch.Tensor) -> torch.Tensor:
    """Sum in fp32, rank after rank."""
    total = rows[0].to(torch.float32, copy=True)
    for row in rows[1:]:
        total += row
    return total


def zeroamp_sum(rows: torch.Tensor) -> torch.Tensor:
    """Sum as zeroamp does: sent in the dtype of the gradient, added in fp32 in the order of its tree."""
    from zeroamp.hooks.collectives.tree_sum import tree_sum

    output = torch.empty(rows.shape[1], dtype=torch.float32)
    tree_sum(rows, output)
    return output


def exact_sum(rows: torch.Tensor) -> torch.Tensor:
    """Sum in fp64."""
    return rows.sum(0, dtype=torch.float64)


@dataclass
class Use:
    """What the hooks of one layer retain: all samples, [samples, length, width], or [samples, length] of tokens."""

    module: nn.Module
    inputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Of the output."""

    def joined(self, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and output gradients as [ranks, tokens of a rank, width], and release the parts."""
        x, gradient = torch.cat(self.inputs), torch.cat(self.gradients)
        self.inputs, self.gradients = [], []
        gradient = gradient.view(num_ranks, -1, gradient.shape[-1])
        return x.view(*gradient.shape[:2], *x.shape[2:]), gradient


class Gradients:
    """The gradients of all ranks at the present weights, of which each is a mean over the rank's tokens.

    Args:
        model: its weights are fp32 (then the forward is under `torch.autocast`), or bf16.
        tokens, labels: int64 [samples, length], the samples of all ranks in their order.
        num_ranks: divides the number of samples.
    """

    def __init__(self, model: LlamaForCausalLM, tokens: torch.Tensor, labels: torch.Tensor, num_ranks: int) -> None:
        self.model, self.num_ranks = model, num_ranks
        self.uses: dict[str, list[Use]] = {}
        """Name of a parameter -> the layers that use it: two for a tied embedding."""
        self.loss = 0.0
        """Mean over all ranks, before the update."""
        by_parameter = {parameter: name for name, parameter in model.named_parameters()}
        handles = []
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding | LlamaRMSNorm):
                use = Use(module)
                self.uses.setdefault(by_parameter[module.weight], []).append(use)
                handles.append(module.register_forward_hook(_retain(use)))
        model.requires_grad_(False)
        per_rank = labels.numel() // num_ranks
        for mine in torch.arange(len(tokens)).split(max(1, TOKENS // tokens.shape[1])):
            loss = functional.cross_entropy(
                logits(model, tokens[mine]).flatten(0, 1), labels[mine].flatten(), reduction="sum"
            )
            (loss / per_rank).backward()
            self.loss += loss.item() / labels.numel()
        model.requires_grad_(True)
        for handle in handles:
            handle.remove()

    def blocks(self) -> Iterator[tuple[str, slice, torch.Tensor]]:
        """Yield (parameter, slice of its first axis, its gradients [ranks, elements]) until all have been computed."""
        for name, uses in self.uses.items():
            rows, width = self.model.get_parameter(name).shape[0], self.model.get_parameter(name)[0].numel()
            joined = [(use.module, *use.joined(self.num_ranks)) for use in uses]
            step = max(1, BLOCK // (self.num_ranks * width))
            for first in range(0, rows, step):
                part = slice(first, min(first + step, rows))
                found = [_of_layer(module, x, gradient, part) for module, x, gradient in joined]
                total = found[0]
                for other in found[1:]:  # a tied embedding: autograd adds in the dtype of the parameter
                    total = total.to(self.model.dtype) + other.to(self.model.dtype)
                yield name, part, total

    def mean(self, add: Sum | dict[str, Sum]) -> Any:
        """Return name -> mean over ranks. With several sums: name of the sum -> the same."""
        sums = add if isinstance(add, dict) else {"": add}
        means: dict[str, dict[str, torch.Tensor]] = {key: {} for key in sums}
        for name, part, rows in self.blocks():
            for key, each in sums.items():
                total = each(rows)
                whole = means[key].setdefault(
                    name, torch.empty(self.model.get_parameter(name).shape, dtype=total.dtype)
                )
                whole[part] = (total / self.num_ranks).view_as(whole[part])
        return means if isinstance(add, dict) else means[""]


def logits(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return fp32 [samples, length, vocabulary], computed under autocast if the weights are fp32."""
    with torch.autocast("cpu", torch.bfloat16) if model.dtype == torch.float32 else nullcontext():
        return model(tokens, use_cache=False).logits.float()


def _retain(use: Use) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        # Under autocast a Linear casts its input.
        x = arguments[0].detach()
        use.inputs.append(x.to(output.dtype) if isinstance(module, nn.Linear) else x)
        if isinstance(module, nn.Embedding):
            output.requires_grad_()  # the first tensor of the graph, as no weight asks for a gradient
        output.register_hook(use.gradients.append)

    return hook


def _of_layer(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor, part: slice) -> torch.Tensor:
    """Return the gradients of some rows of a weight, [ranks, elements]. x, gradient: [ranks, tokens, width]."""
    num_ranks, num_rows = len(x), part.stop - part.start
    if isinstance(module, nn.Linear):
        return torch.bmm(gradient[:, :, part].transpose(1, 2), x).flatten(1)
    if isinstance(module, nn.Embedding):
        is_here = (x >= part.start) & (x < part.stop)
        if module.padding_idx is not None:  # its row has no gradient
            is_here &= x != module.padding_idx
        places = (torch.arange(num_ranks)[:, None] * num_rows + x - part.start)[is_here]
        rows = torch.ops.aten.embedding_dense_backward(gradient[is_here], places, num_ranks * num_rows, -1, False)
        return rows.view(num_ranks, -1)
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    products = gradient * normal.to(x.dtype)
    # Rank by rank, because one sum over all would add in another order.
    return torch.stack([each.sum(0) for each in products])[:, part].to(module.weight.dtype)
