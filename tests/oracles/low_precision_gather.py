"""What a low-precision gather does to a run, found by doing it. Plain torch, and no look at the dispatcher.

Under FSDP2 a parameter that is gathered low *is* a low-precision parameter while the model runs, and its gradient is
in that dtype. So: put such a parameter into a copy of the model, run plain `torch.autocast` on the CPU, and compare
every output and every gradient bit by bit. A second, weaker question only rounds the values and keeps fp32 storage.
"""

import copy

import torch
from torch import nn

SEED = 7


def randomise(model, seed=1):
    """Give every floating-point parameter values that a low dtype cannot represent."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                around = 1.0 if parameter.dim() == 1 else 0.0
                parameter.copy_(around + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def run(model, args, kwargs, dtype=torch.bfloat16):
    """Return all floating-point outputs and, by name or position, all gradients in fp32."""
    args = tuple(t.detach().requires_grad_(t.requires_grad) for t in args)
    torch.manual_seed(SEED)
    with torch.autocast("cpu", dtype=dtype):
        outputs = [t for t in _tensors(model(*args, **kwargs)) if t.is_floating_point()]
    generator = torch.Generator().manual_seed(SEED)
    roots = [t for t in outputs if t.requires_grad]
    cotangents = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in roots]
    if roots:
        torch.autograd.backward(roots, cotangents)
    grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    grads |= {i: t.grad.float() for i, t in enumerate(args) if t.grad is not None}
    assert all(t.isfinite().all() for t in [*outputs, *grads.values()])
    return [t.detach() for t in outputs], grads


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def gathered(model, names, dtype=torch.bfloat16):
    """A copy in which the named parameters are stored in `dtype`, under all their names."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    new = {}
    for name in names:
        old = parameters[name]
        new[id(old)] = nn.Parameter(old.detach().to(dtype), requires_grad=old.requires_grad)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in new:
                setattr(module, name, new[id(parameter)])  # by setattr: nn.LSTM keeps a list of its weights in step
    return model


def rounded(model, names, dtype=torch.bfloat16):
    """A copy in which the named parameters are fp32 with values that `dtype` represents."""
    model = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in names:
            parameters[name].copy_(parameters[name].to(dtype))
    return model


def same(first, second):
    """Whether two runs agree in every bit."""
    return (
        len(first[0]) == len(second[0])
        and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
        and first[1].keys() == second[1].keys()
        and all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    )


def is_unchanged(model, changed, args, kwargs, dtype=torch.bfloat16):
    """Whether a changed copy runs, and to the same bits."""
    base = run(copy.deepcopy(model), args, kwargs, dtype)
    assert same(base, run(copy.deepcopy(model), args, kwargs, dtype)), "the run is not deterministic"
    try:
        return same(base, run(changed, args, kwargs, dtype))
    except (RuntimeError, ValueError):  # a dtype that an op does not take
        return False
