"""The order in which FSDP2's hooks and others see a unit: what zeroamp's hook points rest on."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zeroamp.hooks.collectives.reduce_scatter import GroupReduceScatter


def _seen(module):
    return ("sharded" if isinstance(module.weight, DTensor) else "gathered"), module.weight.dtype


class _Recording(GroupReduceScatter):
    def __call__(self, *args, **kwargs):
        self.events.append("reduce-scatter")
        return super().__call__(*args, **kwargs)


def _observe():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    unit = model[0]
    fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    seen, events = {}, []
    unit.register_forward_pre_hook(lambda m, a: seen.__setitem__("pre, prepended", _seen(m)), prepend=True)
    unit.register_forward_pre_hook(lambda m, a: seen.__setitem__("pre, appended", _seen(m)))
    unit.register_forward_hook(lambda m, a, o: seen.__setitem__("post, prepended", _seen(m)), prepend=True)
    unit.register_forward_hook(lambda m, a, o: seen.__setitem__("post, appended", _seen(m)))
    comm = _Recording(
        communication_dtype=torch.bfloat16, reduce_dtype=torch.float32, collective="all_to_all", world_size=2
    )
    comm.events = events
    unit.set_custom_reduce_scatter(comm)
    unit.weight.register_post_accumulate_grad_hook(
        lambda p: events.append(("accumulated", isinstance(p.grad, DTensor), p.grad.dtype))
    )
    model(torch.ones(1, 4)).sum().backward()
    return seen, events


def test_hooks_see_the_parameters_in_this_order(ranks2):
    seen, events = ranks2.run(_observe)[0]
    assert seen == {
        "pre, prepended": ("sharded", torch.float32),
        "pre, appended": ("gathered", torch.bfloat16),
        "post, prepended": ("gathered", torch.bfloat16),
        "post, appended": ("sharded", torch.float32),
    }
    assert events == ["reduce-scatter", ("accumulated", True, torch.float32)]
