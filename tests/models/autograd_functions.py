"""Linear layers whose backward is written by hand. Plain torch."""

import torch

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
