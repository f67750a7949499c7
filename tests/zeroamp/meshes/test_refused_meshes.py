"""What a mesh with more than data axes is not supported with: one error that names it."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zeroamp
from tests.processes.ranks import RankError
from tests.processes.training import config, policy


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, 8))


def _replace(model, make):
    model.first.weight = nn.Parameter(make(model.first.weight.detach()))


AXES = {
    "both of them": {"dp": 1, "ep": 2, "tp": 2},
    "a context axis beside experts": {"dp": 1, "cp": 2, "ep": 2},
    "replicas (HSDP) beside experts": {"dp_replicate": 2, "dp_shard": 1, "ep": 2},
}
CONFIGS = {
    "zeroamp.reproducible": config(3, zeroamp={"reproducible": True}),
    "zeroamp.param_gather_dtype": config(3, zeroamp={"param_gather_dtype": "float8_e4m3fn"}),
    "ZeRO stage 0": config(0),
    "transformers' style replicated_with_grad_allreduce at ZeRO stage 1": config(1),
}
PLACED = {
    "dimensions that the axis does not divide": lambda weight, axis: distribute_tensor(weight[:7], axis, [Shard(0)]),
    "dimensions whose parts the data ranks do not divide": lambda weight, axis: distribute_tensor(
        weight[:6], axis, [Shard(0)]
    ),
}
OTHERS = (
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.offload_param",
    "initialisation of parameters on the meta device",
)
NAMES = (*AXES, *CONFIGS, *PLACED, *OTHERS)


def _wrap(name):
    """Wrap a model with what the error must name."""
    cfg, axes = CONFIGS.get(name, config(3)), AXES.get(name, {"dp": 2, "tp": 2})
    fields = {"hpz_partition_size": 2} if "hpz" in name else {}
    if "offload" in name:
        cfg["zero_optimization"]["offload_param"] = {"device": "cpu"}
    with torch.device("meta" if "meta device" in name else "cpu"):
        model = Two()
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if name in PLACED:
        _replace(model, lambda weight: PLACED[name](weight, mesh["tp"]))
    elif "tp" in axes:
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel()})
    if "style" in name:
        model._tp_plan = {"norm": "replicated_with_grad_allreduce"}
    zeroamp.wrap_model(model, policy(cfg, fields), mesh)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_supported_is_named(ranks4, name):
    if "param_gather_dtype" in name:
        pytest.importorskip("torchao", reason="wrap_model looks for torchao first")
    with pytest.raises(RankError) as caught:
        ranks4.run(_wrap, name)
    errors = [line for line in str(caught.value).splitlines() if line.startswith("zeroamp.policies.errors.WrapError")]
    assert len(errors) == 4
    assert all(f" is not supported with {name}" in line and "docs/meshes.md" in line for line in errors), errors


def _unknown(how):
    names = {"name": ("dp", "model", "tp"), "no data": ("tp", "cp"), "overlap": ("dp", "tp")}
    shape = (2, 1, 2) if how == "name" else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[how])
    model = Two()
    if how == "overlap":
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel()})
        mesh = init_device_mesh("cpu", (4,))
    zeroamp.wrap_model(model, policy(config(3)), mesh)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("name", "has the axes dp, model, tp. .*Rename them"),
        ("no data", "has the axes tp, cp. .*FSDP2 must shard over one"),
        ("overlap", r'pass the data axis of the same mesh, mesh=mesh\["dp"\]'),
    ],
)
def test_a_mesh_of_other_axes_is_refused(ranks4, how, text):
    with pytest.raises(RankError, match=f"WrapError: .*{text}"):
        ranks4.run(_unknown, how)
