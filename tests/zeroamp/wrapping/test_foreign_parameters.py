"""Parameters that are no plain tensors: refused by name, or all-gathered as stored."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import zeroamp
from tests.models.small import ThreeUnits, build
from tests.processes.ranks import RankError
from tests.processes.training import config, policy
from zeroamp.planning.plan import build_plan


def _replace_weight(model, make):
    linear = model.layers[1]
    linear.weight = nn.Parameter(make(linear.weight.detach()))


def _tensor_parallel(on_meta):
    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta" if on_meta else "cpu"):
        model = ThreeUnits()
    if on_meta:
        _replace_weight(model, lambda weight: DTensor.from_local(weight[:4], mesh, [Shard(0)], run_check=False))
    else:
        _replace_weight(model, lambda weight: distribute_tensor(weight, mesh, [Shard(0)]))
    zeroamp.wrap_model(model, policy(config(3)))


@pytest.mark.parametrize("on_meta", [True, False])
def test_a_tensor_parallel_parameter_without_a_mesh_is_refused(ranks2, on_meta):
    text = r"WrapError: layers\.1\.weight is a DTensor of a mesh of shape .*, but wrap_model got no mesh.*mesh=mesh"
    with pytest.raises(RankError, match=f"--- rank 0[\\s\\S]*{text}[\\s\\S]*--- rank 1[\\s\\S]*{text}"):
        ranks2.run(_tensor_parallel, on_meta)


def test_other_subclasses_and_lazy_parameters_are_refused():
    model = build("two_blocks")
    model.head.weight = model.embed.weight = nn.Parameter(TwoTensor(*[model.head.weight.detach()] * 2))
    with pytest.raises(zeroamp.WrapError, match="embed.weight is a TwoTensor, a tensor subclass"):
        build_plan(model, policy(config(3)))
    with pytest.raises(zeroamp.WrapError, match=r"0\.weight has no shape yet\. Run one forward"):
        build_plan(nn.Sequential(nn.LazyLinear(4)), policy(config(3)))


LOOKUPS = [
    (partial(nn.Embedding, max_norm=1.0), "0.weight is the table of an Embedding with max_norm.*Set max_norm to None"),
    (partial(nn.EmbeddingBag, max_norm=1.0), "0.weight is the table of an EmbeddingBag with max_norm"),
    (partial(nn.Embedding, sparse=True), "0.weight is the table of an Embedding with sparse=True.*Set sparse to False"),
]


@pytest.mark.parametrize(("make", "text"), LOOKUPS)
def test_trained_tables_that_are_written_or_have_sparse_gradients_are_refused(make, text):
    """FSDP2 alone raises in the first backward for sparse gradients, and trains other numbers with max_norm."""
    model = nn.Sequential(make(8, 4), nn.Linear(4, 4))
    for stage in (0, 3):
        with pytest.raises(zeroamp.WrapError, match=text):
            build_plan(model, policy(config(stage)))
    ignored = build_plan(model, policy(config(3)), ignored_params=[model[0].weight])
    assert ignored.ignored_fqns == {"0.weight"}
    model[0].requires_grad_(False)
    assert len(build_plan(model, policy(config(3))).params) == 3
