"""The table of `docs/meshes.md`: each combination that is not built is refused by its name."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zeroamp
from tests.measuring.sources import ROOT
from tests.processes.ranks import RankError
from tests.processes.training import config, policy
from zeroamp.wrapping.refused_meshes import COMBINATIONS

PAGE = ROOT / "docs" / "meshes.md"


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, 8))


def _replace(model, make):
    model.first.weight = nn.Parameter(make(model.first.weight.detach()))


def _wrap(name):
    """Ask for a combination, by the first words of its name that tell it from others."""
    cfg, fields, ignored, axes = config(3), {}, False, {"dp": 2, "tp": 2}
    with torch.device("meta" if "meta device" in name else "cpu"):
        model = Two()
    if "Tensor parallelism together" in name:
        axes = {"dp": 1, "ep": 2, "tp": 2}
    elif "together with context" in name:
        axes = {"dp": 1, "cp": 2, "ep": 2}
    elif "replicas (HSDP)" in name:
        axes = {"dp_replicate": 2, "dp_shard": 1, "ep": 2}
    elif name.startswith("Context"):
        axes = {"dp": 2, "cp": 2}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    tensor = mesh["tp"] if "tp" in axes else None
    if "stage 0" in name:
        cfg = config(0)
    elif "replicated_with_grad_allreduce" in name:
        cfg, model._tp_plan = config(1), {"norm": "replicated_with_grad_allreduce"}
    elif "hpZ" in name:
        fields = {"hpz_partition_size": 2}
    elif "offloading" in name:
        cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    elif "reproducible" in name:
        cfg["zeroamp"] = {"reproducible": True}
    elif "param_gather_dtype" in name:
        pytest.importorskip("torchao", reason="wrap_model looks for torchao first")
        cfg["zeroamp"] = {"param_gather_dtype": "float8_e4m3fn"}
    elif "symmetric_memory" in name:
        cfg["zeroamp"] = {"symmetric_memory": True}
    elif "quantized" in name:
        _replace(model, lambda weight: distribute_tensor(weight, tensor, [Shard(0)]))
        model.first.weight.requires_grad_(False)
        model.first.weight.quant_state = object()
    elif "Partial" in name:
        _replace(model, lambda weight: DTensor.from_local(weight, tensor, [Partial()], run_check=False))
    elif "0-D" in name:
        model.scale = nn.Parameter(distribute_tensor(torch.tensor(1.0), tensor, [Replicate()]))
    elif "unevenly" in name:
        _replace(model, lambda weight: distribute_tensor(weight[:7], tensor, [Shard(0)]))
    elif "do not divide" in name:
        _replace(model, lambda weight: distribute_tensor(weight[:6], tensor, [Shard(0)]))
    elif "ignored_params" in name:
        ignored = True
    if tensor is not None and not isinstance(model.first.weight, DTensor):
        parallelize_module(model, tensor, {"first": ColwiseParallel()})
    ignored = {model.first.weight} if ignored else None
    zeroamp.wrap_model(model, policy(cfg, fields), mesh, ignored_params=ignored)


@pytest.mark.parametrize("name", [each.name for each in COMBINATIONS])
def test_a_combination_is_refused_by_its_name(ranks4, name):
    with pytest.raises(RankError) as caught:
        ranks4.run(_wrap, name)
    errors = [line for line in str(caught.value).splitlines() if line.startswith("zeroamp.policies.errors.WrapError")]
    assert len(errors) == 4
    assert all(line.removeprefix("zeroamp.policies.errors.WrapError: ").startswith(name) for line in errors)
    assert all("is not supported: " in line for line in errors)


def test_the_page_has_the_table():
    rows = [f"| {each.name} | {each.why} | {each.instead} |" for each in COMBINATIONS]
    lines = PAGE.read_text().splitlines()
    assert [row for row in rows if row not in lines] == []


def _unknown(how):
    names = {"name": ("dp", "model", "tp"), "pipeline": ("pp", "dp"), "no data": ("tp", "cp"), "overlap": ("dp", "tp")}
    shape = (2, 1, 2) if how == "name" else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names[how])
    model = Two()
    if how == "overlap":
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel()})
        mesh = init_device_mesh("cpu", (4,))
    if how == "pipeline":
        mesh = mesh["dp"]
    zeroamp.wrap_model(model, policy(config(3)), mesh)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("name", "axis 'model' of unknown use"),
        ("pipeline", "axis 'pp' of 2 ranks: pipeline parallelism"),
        ("no data", "none over which FSDP2 shards"),
        ("overlap", r'pass the data axis of the same mesh, mesh=mesh\["dp"\]'),
    ],
)
def test_a_mesh_of_other_axes_is_refused(ranks4, how, text):
    with pytest.raises(RankError, match=f"WrapError: .*{text}"):
        ranks4.run(_unknown, how)
