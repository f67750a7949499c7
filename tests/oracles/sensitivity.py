"""The oracle of `sensitivity`: one process, plain torch, the precision of each module written out. No zeroamp."""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

MODULES = {
    "embed": "Embedding",
    "norm": "LayerNorm",
    "query": "query",
    "up": "up",
    "down": "down",
    "lm_head": "lm_head",
}
"""Module of `SixModules` -> its group."""
BETWEEN = "between the modules"
GROUPS = {*MODULES.values(), BETWEEN}


@dataclass(frozen=True, kw_only=True)
class Result:
    loss: float
    gradient: dict[str, torch.Tensor]


def _loss(model, tokens, low, dtype):
    """The loss of `SixModules`, whose groups in `low` run under autocast and whose others run in fp32."""

    def layer(name, x):
        is_low = MODULES[name] in low
        x = x.float() if x.is_floating_point() and not is_low else x
        with torch.autocast("cpu", dtype=dtype, enabled=is_low):
            out = getattr(model, name)(x)
        return out if BETWEEN in low else out.float()

    with torch.autocast("cpu", dtype=dtype, enabled=BETWEEN in low):
        x = layer("embed", tokens) * model.scale
        x = x + layer("down", F.gelu(layer("up", layer("query", layer("norm", x)))))
        return F.cross_entropy(layer("lm_head", x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def run(model, of_ranks, low, dtype=torch.bfloat16, scale=1.0):
    """Return the mean loss and gradient of the batches of all ranks."""
    losses, gradients = [], []
    for tokens in of_ranks:
        model.zero_grad()
        loss = _loss(model, tokens, low, dtype).float()
        (loss * scale).backward()
        losses.append(float(loss.detach()))
        gradients.append({name: parameter.grad / scale for name, parameter in model.named_parameters()})
    mean = {name: sum(each[name] for each in gradients) / len(gradients) for name in gradients[0]}
    return Result(loss=sum(losses) / len(losses), gradient=mean)


def change(found, reference, names=None):
    """The norm of the difference over the norm, of the parameters of some modules or of all."""
    names = [name for name in reference.gradient if names is None or name.split(".")[0] in names]
    own = sum(float((found.gradient[n].double() - reference.gradient[n].double()).square().sum()) for n in names)
    return math.sqrt(own / sum(float(reference.gradient[n].double().square().sum()) for n in names)) if own else 0.0


def measure(model, of_ranks, dtype=torch.bfloat16, scale=1.0):
    """Return group -> (loss change, gradient change, own gradient change, that of all others), noise, all low."""
    exact = run(model, of_ranks, set())
    rows = {}
    for group in GROUPS:
        alone = run(model, of_ranks, {group}, dtype, scale)
        own = [module for module, name in (MODULES | {"scale": BETWEEN}).items() if name == group]
        rows[group] = (
            abs(alone.loss - exact.loss) / exact.loss,
            change(alone, exact),
            change(alone, exact, own),
            change(run(model, of_ranks, GROUPS - {group}, dtype, scale), exact),
        )
    first, second = (run(model, [part[rows_] for part in of_ranks], set()) for rows_ in (slice(0, 3), slice(3, 6)))
    difference = {name: first.gradient[name] - second.gradient[name] for name in first.gradient}
    noise = math.sqrt(_square(difference) / _square(exact.gradient)) / 2
    return rows, noise, change(run(model, of_ranks, GROUPS, dtype, scale), exact)


def _square(gradient):
    return sum(float(each.double().square().sum()) for each in gradient.values())
