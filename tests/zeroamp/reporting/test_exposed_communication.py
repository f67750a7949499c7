"""What FSDP2 calls where it gathers, waits and reduces is looked up on its objects, by every torch."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.measuring.collectives import Collectives
from zeroamp.hooks._torch.fsdp import communication_methods
from zeroamp.reporting.exposed_communication import CommunicationWatch


class Listener:
    def __init__(self):
        self.is_inside, self.num_stretches = False, 0

    def enter_communication(self):
        self.is_inside = True
        self.num_stretches += 1

    def leave_communication(self):
        self.is_inside = False


def _watched_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    outside = []
    watch, first, second = CommunicationWatch(model), Listener(), Listener()
    watch.add(first)
    watch.add(second)

    class Seen(Collectives):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "c10d" and not first.is_inside:
                outside.append(str(func))
            return super().__torch_dispatch__(func, types, args, kwargs)

    with Seen() as seen:
        model(torch.ones(2, 4)).sum().backward()
    num_calls = sum(seen.calls.values())
    counts = [(first.num_stretches, second.num_stretches)]
    for listener in (first, second):  # in the order that they came in
        watch.remove(listener)
        model(torch.ones(2, 4)).sum().backward()
        counts.append((first.num_stretches, second.num_stretches))
    left = [name for owner, name in communication_methods(model) if name in vars(owner)]
    return num_calls, outside, counts, left


def test_every_collective_is_inside_a_stretch_that_each_listener_is_told_of_until_it_leaves(ranks2):
    for num_calls, outside, ((all_told, n), (first, second), last), left in ranks2.run(_watched_step):
        assert num_calls >= 2
        assert (outside, left) == ([], [])
        assert all_told == n > 0
        assert (first, second) == (n, 2 * n)
        assert last == (n, 2 * n)
