"""Checkpoints of parameters that are sharded over several dimensions: other ranks, other dimensions, the same bits."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import zeroamp
from tests.models.small import OddBlock
from tests.processes.checkpoint_training import VOCAB, Case, Training, differences, error_of, full, group_of
from tests.processes.training import mesh_of, sharded_dims
from tests.selection import slow_but
from zeroamp.tensor_shards import local_slices


class Block(OddBlock):
    """A unit of `Training`."""


class OddModel(nn.Module):
    """Its parameters are sharded over dimensions 0, 1 and 2 on 2 and 4 ranks, and over other ones on 3."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def _case(size, **more):
    return Case(group_size=size, build=OddModel, **more)


def _save(folder, case):
    training = Training(case).run(0, 2)
    training.save(f"{folder}/{group_of(case)}", extra={"at": 2})
    return training.state(), sharded_dims(training.model)


def _load(folder, case, save_to=None):
    """Load on the ranks of the case's first group; the last rank of 4 looks on where 3 load."""
    if case.group_size == 3 and dist.get_rank() == 3:
        dist.new_group([3], use_local_synchronization=True)
        return None
    training = Training(case, seed=7).run(0, 1)
    training.load(folder)
    if save_to is not None:
        training.save(save_to, extra={"at": 2})
    state, dims = training.state(), sharded_dims(training.model)
    training.run(2, 3)
    return state, dims


def _difference(ours, theirs):
    return [text for text in differences(ours, theirs) if not text.startswith("random")]


OTHER_DIMS = {"embed.weight", "head.weight"} | {
    f"blocks.{i}.{name}" for i in (0, 1) for name in ("up.weight", "experts", "mixers")
}


@pytest.mark.parametrize("optimizer", slow_but(["adamw", "momentum", "fused"], "adamw"))
def test_from_two_ranks_to_four_to_three(ranks4, tmp_path, optimizer):
    two, four, three = (_case(size, optimizer=optimizer) for size in (2, None, 3))
    saved, dims = ranks4.run(_save, str(tmp_path), two)[0]
    assert {name for name, dim in dims.items() if dim} == OTHER_DIMS
    assert set(dims.values()) == {0, 1, 2}
    for state, of_four in ranks4.run(_load, str(tmp_path / "0"), four, str(tmp_path / "four")):
        assert _difference(state, saved) == []
        assert of_four == dims
    for state, of_three in ranks4.run(_load, str(tmp_path / "four"), three)[:3]:
        assert _difference(state, saved) == []
        assert {name for name, dim in of_three.items() if dim} == {"blocks.0.down.weight", "blocks.1.down.weight"}


DIM_0 = {"zeroamp": {"shard_dim": 0}}
CHANGES = {
    "dimension 0 to planned": (_case(2, options=DIM_0), _case(None)),
    "planned to dimension 0": (_case(2), _case(None, options=DIM_0)),
    "HSDP to 1-D": (Case(mesh_shape=(2, 2), build=OddModel), _case(None)),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", slow_but(CHANGES, "planned to dimension 0"))
def test_other_dimensions(ranks4, tmp_path, change):
    before, after = CHANGES[change]
    saved, _ = ranks4.run(_save, str(tmp_path), before)[0]
    for state, _ in ranks4.run(_load, str(tmp_path / "0"), after):
        assert _difference(state, saved) == []


def _resume(folder):
    """Return what differs between training on and resuming, on as many ranks."""
    training = Training(_case(None)).run(0, 2)
    training.save(folder)
    resumed = Training(_case(None), seed=7)
    resumed.load(folder)
    return _difference(resumed.run(2, 4).state(), training.run(2, 4).state())


def test_training_goes_on_bit_for_bit(ranks2, tmp_path):
    assert ranks2.run(_resume, str(tmp_path)) == [[], []]


class _OwnState(torch.optim.SGD):
    """Keeps plain state of each rank's shard, as 8-bit optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["last"] = parameter.grad.to_local().detach().clone()


def _own_state(folder, keys):
    def case(key):
        return _case(None, optimizer=lambda p: _OwnState(p, lr=0.1), options={"zeroamp": {"shard_dim": key}})

    Training(case(keys[0])).run(0, 2).save(folder)
    error = error_of(Training(case(keys[1]), seed=7).load, folder)
    alone = Training(case(keys[1]), seed=7)
    zeroamp.load_checkpoint(folder, alone.model)
    return error


def test_state_of_each_rank_s_own_shard_is_refused_if_another_dimension_is_sharded(ranks2, tmp_path):
    for number, keys in enumerate((("auto", 0), (0, "auto"))):
        for error in ranks2.run(_own_state, str(tmp_path / str(number)), keys):
            assert re.search(
                r"CheckpointError: .*cannot be resharded.*was sharded .*Shard\(dim=[01]\).*shard_dim", error
            )
    assert ranks2.run(_own_state, str(tmp_path / "same"), ("auto", "auto")) == [None, None]


def _exported(folder, size):
    """Export on some ranks; return the parameters."""
    training = Training(_case(size)).run(0, 1)
    zeroamp.export_hf(training.model, f"{folder}/hf{group_of(_case(size))}", "fp32", max_shard_bytes=500)
    return {name: full(parameter) for name, parameter in training.model.named_parameters()}


def _filled(folder, options, mesh_shape):
    """Return the parameters of a meta model that was filled from safetensors, and what of them was read where."""
    with torch.device("meta"):
        model = OddModel()
    mesh = mesh_of(mesh_shape)
    cfg = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, **options}
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg), mesh, {"Block"})
    zeroamp.load_hf(model, folder)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.to_local(), full(parameter)[local_slices(parameter)])
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def test_exports_and_loads_of_safetensors(ranks4, tmp_path):
    expected = ranks4.run(_exported, str(tmp_path), 2)[0]
    for options, mesh_shape in (({}, None), (DIM_0, None), ({}, (2, 2))):
        for found in ranks4.run(_filled, str(tmp_path / "hf0"), options, mesh_shape):
            assert found.keys() == expected.keys()
            assert [name for name in found if not torch.equal(found[name], expected[name])] == []
