"""Small models whose blocks return tensors by other ways than their output: lists, dicts, attributes and views."""

from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SIZE = 8


def router_loss(gate, x):
    """The loss of a router, as z-loss does it."""
    return gate(x).float().logsumexp(-1).pow(2).mean()


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.gate = nn.Linear(SIZE, 4)
        self.norm = nn.LayerNorm(SIZE)

    def mix(self, x):
        return x + torch.tanh(self.linear(self.norm(x))).to(x.dtype)


class _Stack(nn.Module):
    """Three blocks. `checkpointing` is None, or `use_reentrant` of each block's checkpoint."""

    block: type[nn.Module]
    checkpointing = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.same = []
        """What the caller of the blocks saw of its own objects, one bool per look."""

    def run(self, block, *args):
        if self.checkpointing is None:
            return block(*args)
        return checkpoint(block, *args, use_reentrant=self.checkpointing)


class RouterBlock(_Block):
    def forward(self, x, losses):
        losses.append(router_loss(self.gate, x))
        return self.mix(x)


class Routers(_Stack):
    """Blocks append a loss to the list that they get."""

    block = RouterBlock

    def forward(self, x, losses=None):
        losses = [] if losses is None else losses
        x = self.embed(x)
        for block in self.blocks:
            before = list(losses)
            x = self.run(block, x, losses)
            self.same.append(all(one is other for one, other in zip(before, losses, strict=False)))
        return x.float().pow(2).mean() + sum(losses)


class RoutersWithMethod(Routers):
    def run_all(self, x, losses):
        return self.forward(x, losses)


class LateRouterBlock(_Block):
    def forward(self, x, losses):
        out = self.mix(x)
        losses.append((router_loss(self.gate, x), "z"))
        return out


class LateRouters(_Stack):
    """Blocks append in a tuple, after the output was computed. The loss does not use the last block's output."""

    block = LateRouterBlock

    def forward(self, x):
        losses, x = deque(), self.embed(x)
        for block in self.blocks:
            x = self.run(block, x, losses)
        return sum(loss for loss, _ in losses)


class SharingBlock(_Block):
    def forward(self, x, shared):
        if "kv" not in shared:
            shared["kv"] = self.linear(shared["x0"])
        shared["seen"].append(shared["x0"] + shared["nested"][0][0])
        return self.mix(x * shared["kv"])


class Sharing(_Stack):
    """Blocks write and read a dict of shared states, as Gemma's do. A list is inside of it, and in a tuple of it."""

    block, make = SharingBlock, dict

    def forward(self, x):
        x0 = self.embed(x)
        inner = [2 * x0]
        first = inner[0]
        shared = self.make(x0=x0, seen=[], nested=(inner, "text"))
        x, seen, nested = x0, shared["seen"], shared["nested"]
        for block in self.blocks:
            x = self.run(block, x, shared)
            self.same += [shared["x0"] is x0, shared["seen"] is seen, shared["nested"][0] is inner, inner[0] is first]
            self.same += [shared["nested"] is nested]
        return x.float().pow(2).mean() + sum(each.float().mean() for each in seen) / 10


class SharingOrdered(Sharing):
    make = OrderedDict


class SharingDefault(Sharing):
    def make(self, **values):
        return defaultdict(list, **values)


class SharingOther(Sharing):
    """The dict is of a class that FSDP2 does not look into."""

    make = UserDict


@dataclass
class State:
    """What blocks read and write, the hidden state included."""

    x: torch.Tensor
    losses: list = field(default_factory=list)
    best: torch.Tensor | None = None


class StateBlock(_Block):
    def forward(self, state):
        state.losses.append(router_loss(self.gate, state.x))
        state.best = state.x if state.best is None else torch.maximum(state.best, state.x)
        state.x = self.mix(state.x)


class States(_Stack):
    """Blocks change an object of a dataclass, and return nothing."""

    block = StateBlock

    def forward(self, x):
        state = State(self.embed(x))
        for block in self.blocks:
            self.run(block, state)
        return state.x.float().pow(2).mean() + sum(state.losses) + state.best.float().mean() / 10


class FailingBlock(_Block):
    def forward(self, x, state, index):
        state["count"] = state.get("count", 0) + 1
        if state["fails"] == index:
            raise KeyError(index)
        return self.mix(x) + state["x"]


class Failing(_Stack):
    """Raises in a block, or after the blocks."""

    block = FailingBlock

    def forward(self, x, state):
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x, state, index)
        if state["fails"] == "root":
            raise KeyError("root")
        return x.float().pow(2).mean()


class ViewBlock(_Block):
    how = "tensor"

    def forward(self, x, y=None):
        view = self.linear(x).unsqueeze(0).squeeze(0)
        if self.how == "view of input":
            return x.unsqueeze(0).squeeze(0), self.linear(1.0 * x)
        if self.how == "kept":
            self.base = torch.tanh(self.linear(x)) * 2
            return self.base.unsqueeze(0).squeeze(0), self.linear(x)
        other = self.gate(x).unsqueeze(0).squeeze(0)
        return {"tensor": view, "tuple": (view, other), "dict": {"a": [view], "b": other}}[self.how]


class _Views(_Stack):
    """The caller changes in place what the blocks return, which are views."""

    block = ViewBlock

    def forward(self, x):
        x = 2 * self.embed(x)
        for _ in range(2):  # each block runs twice before its backward
            for block in self.blocks:
                out = block(x)
                h, *others = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else (out,)
                h = h[0] if isinstance(h, list) else h
                h += 1 + others[0].float().mean().to(h.dtype) if others else x.detach()
                if block.how == "view of input":
                    h = x + others[0]  # x was changed, too
                if block.how == "kept":
                    h = h + block.base  # as was the base
                x = h
                for other in others:
                    other *= 2
                    x = x + other.float().mean().to(x.dtype)
        return x.float().pow(2).mean()


class ViewTensors(_Views):
    pass


class _OfHow(_Views):
    how = "tensor"

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.how = self.how


class ViewTuples(_OfHow):
    how = "tuple"


class ViewDicts(_OfHow):
    how = "dict"


class ViewsOfInputs(_OfHow):
    how = "view of input"


class ViewsOfKept(_OfHow):
    how = "kept"


class KeepingBlock(_Block):
    def forward(self, x):
        self.kept = self.linear(x)
        return self.gate(torch.tanh(self.kept))


class Keeping(_Stack):
    """Blocks keep a tensor of which a loss may be computed. The inputs of the first one need no gradient."""

    block = KeepingBlock

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)

    def forward(self, x):
        x = self.embed(x)
        return torch.cat([block(x) for block in self.blocks])


def noise(index):
    """Inputs number `index`."""
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1000 + index))


def build(cls):
    """Build a model of the same weights in every process."""
    torch.manual_seed(0)
    return cls()
