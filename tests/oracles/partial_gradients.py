"""The oracle of partial gradients: one process, plain torch, all data and tensor ranks written out. No zeroamp.

Each rank computes gradients of the whole model on its own tokens. Those that depend on tokens are summed over the
tensor ranks of each data rank. All are averaged over the data ranks then. Both sums take what ranks send: gradients in
the communication dtype.
"""

import copy
import math

import torch

from tests.oracles.one_process import clip_norm, ordered_sum, tree


def train(
    model, tokens_of, num_steps, *, num_data, num_tensor, accumulation=1, autocast=None, low=None, sent_as=None,
    native=False, reduce_each=True, scale=1.0,
):  # fmt: skip
    """Return (norms[step], skipped[step], {fqn: parameter}).

    tokens_of(index, rank, size): with the index of data rank d in micro-batch m being m x num_data + d.
    autocast, low: the dtype of autocast, or that of the whole model (fp32 master weights).
    sent_as: the communication dtype. None: that of Linears is `autocast`, or all are sent in `low`.
    native: the data ranks' sums are in the communication dtype, too. Those of two tensor ranks are rounded once anyway.
    reduce_each: reduce each micro-batch (stages 2 and 3), else their sum on each rank (stage 1).
    scale: the loss scale. It is halved, and the step skipped, if a gradient is not finite.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms, skipped = [], []
    for step in range(num_steps):
        ranks = [
            [
                [
                    _gradients(model, tokens_of((step * accumulation + micro) * num_data + data, tensor, num_tensor),
                               scale / accumulation, autocast, low)
                    for micro in range(accumulation)
                ]
                for tensor in range(num_tensor)
            ]
            for data in range(num_data)
        ]  # fmt: skip
        for fqn, parameter in model.named_parameters():
            is_low = low is not None or "linear" in fqn or "head" in fqn
            sent = (sent_as or low or autocast) if is_low else torch.float32
            summed = slice(1) if fqn == "scale" else slice(None)  # that of `scale` does not depend on tokens
            table = [[[micro[fqn] for micro in tensor] for tensor in data[summed]] for data in ranks]
            if not reduce_each:
                table = [[[ordered_sum(micros)] for micros in data] for data in table]
            means = []
            for micro in range(len(table[0][0])):
                sums = [_summed([tensor[micro] for tensor in data], sent, native) for data in table]
                means.append(_averaged(sums, sent, native))
            parameter.grad = ordered_sum(means) / scale
        norms.append(clip_norm(model, 0))
        skipped.append(not math.isfinite(norms[-1]))
        if skipped[-1]:
            scale /= 2
        else:
            optimizer.step()
    return norms, skipped, {fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()}


def _gradients(model, tokens, scale, autocast, low):
    run = copy.deepcopy(model)
    if low is not None:
        run, tokens = run.to(low), tokens.to(low)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = run(tokens)
    (loss * scale).backward()
    return {fqn: parameter.grad for fqn, parameter in run.named_parameters()}


def _summed(gradients, sent, native):
    """The sum over the tensor ranks of one data rank, as it is sent to the other data ranks."""
    gradients = [gradient.to(sent) for gradient in gradients]
    if native:
        assert len(gradients) <= 2, "the order of a backend's sum of more is not defined"
    return tree(gradients).to(sent)


def _averaged(sums, sent, native):
    if not native:
        return tree(sums) / len(sums)
    assert len(sums) <= 2, "the order of a backend's sum of more is not defined"
    return (tree(sums).to(sent) / len(sums)).float()
