"""Replicas that differ are not saved: the error names the first parameter or state, on all ranks."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.processes.checkpoint_training import Case, Training, differences, error_of
from tests.selection import slow_but
from zeroamp.checkpoint.replicas import checksum


def _diverged(training, what):
    """Change one element on the last rank."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    model, optimizer = training.model, training.optimizer
    parameter = dict(model.named_parameters())["blocks.1.down.weight"]
    with torch.no_grad():
        if what == "parameter":
            parameter.to_local().view(-1)[0] += 1e-6
        elif what == "rows":
            local = parameter.to_local()
            local.copy_(local.flip(0))
        elif what == "frozen":
            model.frozen.to_local().view(-1)[0] += 1
        elif what == "state":
            optimizer.state[parameter]["exp_avg"].to_local().view(-1)[-1] += 1e-8


NAMES = {
    "parameter": "blocks.1.down.weight",
    "rows": "blocks.1.down.weight",
    "frozen": "frozen",
    "state": "optimizer.blocks.1.down.weight.exp_avg",
}


def _refuse(folder, case):
    found = {}
    for what in NAMES:
        training = Training(case).run(0, 1)
        _diverged(training, what)
        found[what] = error_of(training.save, folder)
    return found


@pytest.mark.parametrize(
    "case",
    slow_but(
        [Case(stage=0), Case(stage=3, mesh_shape=(2, 2)), Case(stage=1, mesh_shape=(4, 1))],
        Case(stage=3, mesh_shape=(2, 2)),
    ),
)
def test_replicas_that_differ_are_refused_by_name_on_all_ranks(ranks4, tmp_path, case):
    for found in ranks4.run(_refuse, str(tmp_path / "none"), case):
        for what, name in NAMES.items():
            assert found[what] is not None, what
            assert re.match(rf"CheckpointError: (model\.)?{re.escape(name)} .*\b3\b", found[what]), what
    assert not (tmp_path / "none").exists()


def _saved(folder, case):
    training = Training(case).run(0, 1)
    training.save(folder)
    state = training.state()
    loaded = Training(case, seed=7)
    loaded.load(folder)
    return differences(loaded.state(), state)


def test_equal_replicas_are_saved(ranks4, tmp_path):
    for index, case in enumerate([Case(stage=0), Case(stage=2, mesh_shape=(2, 2))]):
        assert ranks4.run(_saved, f"{tmp_path}/{index}", case) == [[]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64])
def test_a_checksum_sees_every_bit_and_place(dtype):
    tensor = torch.arange(3 * 2**10 + 1, dtype=torch.int64).remainder(2).to(dtype)
    sums = {int(checksum(tensor, chunk=2**10))}
    for index in (0, 1, 2**10, 3 * 2**10):
        changed = tensor.clone()
        changed[index] = 1 - changed[index].to(torch.float32)
        sums.add(int(checksum(changed, chunk=2**10)))
    sums.add(int(checksum(tensor.flip(0).roll(1), chunk=2**10)))
    sums.add(int(checksum(tensor.roll(2**10 + 1), chunk=2**10)))
    assert len(sums) == 7
    assert int(checksum(tensor.clone(), chunk=2**10)) in sums
