"""Shortened hooks of FSDP2 make functions and inspect signatures once, and have the same results."""

import inspect
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common

from zeroamp.hooks._torch.shorter_hooks import OF_GROUP, OF_STATE, shorten_hooks

pytestmark = pytest.mark.skipif(
    not hasattr(_fsdp_common, "_dynamo_disable"), reason="this torch excludes no hook in each call"
)


def _model(*, is_excluded_once):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    if is_excluded_once:
        shorten_hooks(model)
    return model


def _runs():
    """Return (names of a unit's hooks, functions made, signatures inspected, gradients), long and shortened."""
    found = []
    for is_excluded_once in (False, True):
        model = _model(is_excluded_once=is_excluded_once)
        x = torch.arange(8.0).view(2, 4)
        model(x).sum().backward()
        with (
            mock.patch.object(torch._dynamo, "disable", wraps=torch._dynamo.disable) as disable,
            mock.patch.object(inspect, "signature", wraps=inspect.signature) as signature,
        ):
            model(x.requires_grad_()).sum().backward()
        hooks = [*model[1]._forward_pre_hooks.values(), *model[1]._forward_hooks.values()]
        names = [hook.__name__ for hook in hooks]
        gradients = [parameter.grad.to_local() for parameter in model.parameters()]
        gradients.append(x.grad)
        found.append((names, disable.call_count, signature.call_count, gradients))
    return found


def test_a_step_makes_no_function_and_inspects_no_signature(ranks2):
    for before, after in ranks2.run(_runs):
        names, calls, signatures, gradients = before
        names_once, calls_once, signatures_once, gradients_once = after
        assert names_once == names == ["_pre_forward", "_post_forward"]
        # Three hooks of each of three states, two of each of two groups, and the end of the backward, which is left.
        assert (calls, calls_once) == (14, 1)
        is_python = isinstance(vars(torch.autograd.Function)["apply"], classmethod)  # not from torch 2.15 on
        assert (signatures, signatures_once) == (2, 0 if is_python else 2)
        assert all(torch.equal(*pair) for pair in zip(gradients, gradients_once, strict=True))


def _replaced():
    model = _model(is_excluded_once=True)
    state = model[1]._get_fsdp_state()
    return [name for name in OF_STATE if name in vars(state)], [
        name for name in OF_GROUP for group in state._fsdp_param_groups if name in vars(group)
    ]


def test_every_hook_is_found(ranks2):
    assert ranks2.run(_replaced)[0] == ([*OF_STATE], [*OF_GROUP])
