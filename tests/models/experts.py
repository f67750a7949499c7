"""Mixtures of experts: transformers' in each of their forms, and experts that are modules. Plain torch."""

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F

from tests.models.families import FAMILIES, NUM_RANKS, Family

WIDTH, NUM_EXPERTS = 16, 6


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class ListBlock(nn.Module):
    """Runs only the experts that some token of the batch chose, among those that the batch offers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))

    def forward(self, x: torch.Tensor, offered: list[int]) -> torch.Tensor:
        tokens = self.norm(x)
        weights, chosen = self.router(tokens).float()[:, offered].softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        for index, number in enumerate(offered):
            of_expert = (chosen == index).nonzero().flatten()
            if len(of_expert):
                output = self.experts[number](tokens[of_expert]) * weights[of_expert, None]
                result = result.index_add(0, of_expert, output.to(result.dtype))
        return x + result


class ListModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ListBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, offered: list[int]) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, offered)
        return F.cross_entropy(self.head(x).float(), torch.arange(len(x)) % 4)


def _offered(index: int) -> dict:
    """Batches offer expert 0 on every rank and two more, others on each; no batch offers expert 5."""
    rank = index % NUM_RANKS
    noise = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(500 + index))
    return {"x": noise, "offered": [0, 1 + 2 * rank, 2 + 2 * rank]}


def _with(implementation: str, family: Family) -> Family:
    def build() -> nn.Module:
        model = family.build()
        model.set_experts_implementation(implementation)
        return model

    return dataclasses.replace(family, build=build)


EXPERTS: dict[str, Family] = {
    "Mixtral": FAMILIES["Mixtral"],
    "Mixtral eager": _with("eager", FAMILIES["Mixtral"]),
    "Mixtral batched_mm": _with("batched_mm", FAMILIES["Mixtral"]),
    "DeepSeek-V3": FAMILIES["DeepSeek-V3"],
    "gpt-oss": FAMILIES["gpt-oss"],
    "modules": Family(build=ListModel, batch=_offered),
}
"""Of transformers' models the routers choose by the tokens, which are others on each rank."""
