"""Modules that each use a parameter in one particular way, and which of them only cast it. Plain torch.

`USES[name]` is (a function that builds the module, the names of its safe parameters). Each takes a (3, 8) input.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

BF16 = torch.bfloat16


class CastsInputs(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=BF16)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class CastsByHand(torch.autograd.Function):
    """Saves the weight itself; `reads` and `returns` are the dtypes in which the backward reads it and returns."""

    @staticmethod
    def forward(ctx, x, w, reads, returns):
        ctx.save_for_backward(x, w)
        ctx.reads, ctx.returns = reads, returns
        return x.to(BF16) @ w.to(BF16).t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return (g.to(ctx.reads) @ w.to(ctx.reads)).float(), g.to(ctx.returns).t() @ x.to(ctx.returns), None, None


class Uses(nn.Module):
    """A weight `w` of (8, 8), a bias `b` of (8,), a Linear `lin` without bias, and a forward that is handed in."""

    def __init__(self, forward, trainable=True):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8, 8), requires_grad=trainable)
        self.b = nn.Parameter(torch.zeros(8), requires_grad=trainable)
        self.lin = nn.Linear(8, 8, bias=False)
        self.lin.weight.requires_grad_(trainable)
        self.use = forward

    def forward(self, x):
        return self.use(self, x)


def frozen(forward):
    return lambda: Uses(forward, trainable=False)


def trainable(forward):
    return lambda: Uses(forward)


def other_low_dtype(m, x):
    with torch.autocast("cpu", dtype=torch.float16):
        h = m.lin(x)
    return F.linear(h, m.w, m.b)


def written_in_place(m, x):
    with torch.no_grad():
        m.lin.weight.mul_(0.7)
    return F.linear(m.lin(x), m.w, m.b)


def checkpointed_twice(use_reentrant):
    def forward(m, x):
        for _ in range(2):
            x = checkpoint(lambda h: F.linear(h, m.w, m.b), m.lin(x), use_reentrant=use_reentrant)
        return x

    return forward


def by_hand(reads, returns):
    return lambda m, x: F.linear(CastsByHand.apply(x, m.lin.weight, reads, returns), m.w, m.b)


def in_chunks(uses):
    """Each chunk of `w` is cast by itself, the second one in `uses` products."""

    def forward(m, x):
        first, second = m.w.chunk(2)
        products = [F.linear(m.lin(x), second, m.b[4:]) for _ in range(uses)]
        return torch.cat([F.linear(x, first), *products], dim=-1)

    return forward


def list_outputs(m, x):
    return {"out": [F.linear(m.lin(x), m.w, m.b)], "weight": m.lin.weight}


ALL = {"w", "b", "lin.weight"}
REST = {"w", "b"}

USES = {
    "a Linear and F.linear": (trainable(lambda m, x: F.linear(m.lin(x), m.w, m.b)), ALL),
    "called twice: one cast, cached": (trainable(lambda m, x: F.linear(m.lin(m.lin(x)), m.w, m.b)), ALL),
    "called twice, frozen: two casts": (frozen(lambda m, x: F.linear(m.lin(m.lin(x)), m.w, m.b)), ALL),
    "also read in fp32": (trainable(lambda m, x: F.linear(m.lin(x), m.w, m.b) * m.lin.weight.norm()), REST),
    "locally another dtype": (trainable(other_low_dtype), REST),
    "float() of an fp32 weight, then cast": (trainable(lambda m, x: F.linear(m.lin(x), m.w.float(), m.b)), ALL),
    "disjoint rows": (
        trainable(lambda m, x: F.linear(x, m.w[:3]).sum() + F.linear(m.lin(x), m.w[3:], m.b[3:])),
        {"b", "lin.weight"},
    ),
    "in chunks": (trainable(in_chunks(1)), ALL),
    "in chunks, of which one is cast twice": (trainable(in_chunks(2)), {"lin.weight"}),
    "concatenated with another": (
        trainable(lambda m, x: F.linear(x, torch.cat([m.w, m.lin.weight]), torch.cat([m.b, m.b.detach()]))),
        set(),
    ),
    "written in place": (frozen(written_in_place), REST),
    "cast by the model, once": (trainable(lambda m, x: F.linear(m.lin(x), m.w.bfloat16(), m.b.to(BF16))), ALL),
    "cast by the model, twice": (
        trainable(lambda m, x: F.linear(F.linear(m.lin(x), m.w.bfloat16()), m.w.bfloat16(), m.b)),
        {"b", "lin.weight"},
    ),
    "returned": (trainable(list_outputs), REST),
    "checkpointed twice": (trainable(checkpointed_twice(False)), ALL),
    "checkpointed twice, reentrant": (trainable(checkpointed_twice(True)), {"lin.weight"}),
    "Function with cast_inputs": (
        trainable(lambda m, x: CastsInputs.apply(F.linear(m.lin(x), m.b.view(1, 8)), m.w[:, :1])),
        {"b", "lin.weight"},
    ),
    "Function, all low": (trainable(by_hand(BF16, BF16)), ALL),
    "Function whose backward reads fp32": (trainable(by_hand(torch.float32, BF16)), REST),
    "Function whose gradient is fp32": (trainable(by_hand(BF16, torch.float32)), REST),
    "asks by type_as": (trainable(lambda m, x: F.linear(x.type_as(m.lin.weight) * 1.7, m.w, m.b) + m.lin(x)), REST),
}
