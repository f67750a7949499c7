"""What FSDP2 calls where it gathers, waits and reduces is looked up on its objects, by every torch."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.collectives import Collectives
from zeroamp.hooks import CommunicationWatch


def _watched_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    inside, stretches, outside = [False], [], []

    def enter():
        inside[0] = True
        stretches.append("one")

    def leave():
        inside[0] = False

    watch = CommunicationWatch(enter, leave)
    watch.attach(model)

    class Seen(Collectives):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d" and not inside[0]:
                outside.append(str(func))
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Seen() as seen:
        model(torch.ones(2, 4)).sum().backward()
    num_calls, num_stretches = sum(seen.calls.values()), len(stretches)
    watch.detach()
    model(torch.ones(2, 4)).sum().backward()
    return num_calls, outside, num_stretches > 0, len(stretches) == num_stretches


def test_every_collective_is_inside_a_stretch_and_none_is_watched_after(ranks2):
    for num_calls, outside, was_watched, is_detached in ranks2.run(_watched_step):
        assert num_calls >= 2
        assert (outside, was_watched, is_detached) == ([], True, True)
