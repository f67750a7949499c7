"""With NCCL, `wrap_model` runs on each process group each kind of collective that training issues on that group."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import zeroamp
from tests.measuring.collectives import KINDS
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped
from tests.selection import needs_options
from zeroamp.wrapping import connect
from zeroamp.wrapping.state import wrap_state

NAME = "llama_tied"


class _Used(TorchDispatchMode):
    """`calls`: (kind, name of the process group, bytes) of the collectives that reach the backend."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            group = next(
                arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
            )
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            name = dist.ProcessGroup.unbox(group).group_name
            self.calls.append((KINDS.get(func._schema.name.split("::")[1]), name, tensor.nbytes))
        return func(*args, **(kwargs or {}))


def _calls(cfg, mesh_shape, fields, backend):
    """Return sets of (kind, process group) of `connect_ranks` and of two optimizer steps, and the most bytes."""
    model = wrapped(NAME, config(**cfg), mesh_shape=mesh_shape, fields=fields)
    original, connect.is_nccl = connect.is_nccl, lambda _group, _device_type: backend == "nccl"
    try:
        with _Used() as first:
            connect.connect_ranks(model, wrap_state(model))
    finally:
        connect.is_nccl = original
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with _Used() as training:
        for index in range(2):
            step.backward(loss_of(model, batch(NAME, index)))
            step.step()
    by_call = [{call[:2] for call in used.calls} for used in (first, training)]
    of_step = {("all_reduce", dist.group.WORLD.group_name)}  # used by `wrap_model` itself
    nodes = [*wrap_state(model).nodes.reductions.values(), *wrap_state(model).nodes.gathers.values()]
    in_levels = {group.group_name for each in nodes for group in (each.inside, each.across)}
    return (
        sorted(by_call[0]),
        sorted(call for call in by_call[1] - of_step if call[1] not in in_levels),
        len(first.calls),
        max((call[2] for call in first.calls), default=0),
    )


CASES = {
    "stage 0": ({"stage": 0}, None, None),
    "stage 3": ({"stage": 3, "threshold": 0}, None, None),
    "native": ({"stage": 2, "zeroamp": {"reduce_accumulate_dtype": "native"}}, None, None),
    "HSDP": ({"stage": 2}, (2, 2), None),
    "native HSDP": ({"stage": 2, "zeroamp": {"reduce_accumulate_dtype": "native"}}, (2, 2), None),
    "hpZ": ({"stage": 3, "threshold": 0}, None, {"hpz_partition_size": 2}),
    "two levels": ({"stage": 3, "threshold": 0, "zeroamp": {"ranks_per_node": 2}}, None, None),
    "separate": ({"stage": 3, "threshold": 0, "zeroamp": {"separate_reduce_scatter_group": True}}, None, None),
}

FAST = ("stage 3", "HSDP")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[needs_options] * (c == "separate") + [pytest.mark.slow] * (c not in FAST)) for c in CASES],
)
def test_every_group_is_used_for_what_training_uses_it_for(ranks4, case):
    for first, training, num_calls, num_bytes in ranks4.run(_calls, *CASES[case], "nccl"):
        assert first == training
        assert num_calls == len(first)
        assert num_bytes <= 16


def test_nothing_is_sent_with_another_backend(ranks4):
    for first, training, num_calls, _ in ranks4.run(_calls, *CASES["hpZ"], "gloo"):
        assert (first, num_calls) == ([], 0)
        assert training


def _backends():
    return [connect.is_nccl(dist.group.WORLD, kind) for kind in ("cpu", "cuda")]


def test_the_backend_of_the_device_counts(ranks2, monkeypatch):
    assert ranks2.run(_backends)[0] == [False, False]
    for text, kinds in {"cuda:nccl": [0, 1], "cpu:gloo,cuda:nccl": [0, 1], "cpu:fake,cuda:fake": [0, 0]}.items():
        monkeypatch.setattr(dist, "get_backend_config", lambda _group, text=text: text)
        assert [connect.is_nccl(None, kind) for kind in ("cpu", "cuda")] == kinds
