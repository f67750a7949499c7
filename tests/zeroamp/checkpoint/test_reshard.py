"""Another number of ranks, stage, mesh or sharded dimension: the same full tensors, bit for bit."""

import logging
import re

import pytest
import torch
import torch.distributed as dist

from tests.measuring.logs import log_lines
from tests.models.small import OddRows
from tests.processes.checkpoint_training import Case, Training, differences, group_of, refused
from tests.processes.training import sharded_dims
from tests.selection import slow_but


def _save(folder, case):
    """Save as group number N to folder/N."""
    training = Training(case).run(0, 2)
    training.save(f"{folder}/{group_of(case)}", extra={"at": 2})
    return training.state(), sharded_dims(training.model) if case.stage else {}


def _load(folder, case, save_to=None):
    """Load on the ranks of the case's groups; the last rank of 4 looks on where 3 load."""
    if case.group_size == 3 and dist.get_rank() == 3:
        dist.new_group([3], use_local_synchronization=True)
        return None
    training = Training(case, seed=7).run(0, 1)
    generators = torch.get_rng_state()
    with log_lines(logging.INFO) as texts:
        extra = training.load(folder)
    assert extra == {"at": 2}
    is_drawn = not torch.equal(generators, torch.get_rng_state())
    if save_to is not None:
        training.save(save_to, extra=extra)
    state, dims = training.state(), sharded_dims(training.model) if case.stage else {}
    training.run(2, 3)
    return state, dims, texts, is_drawn


def test_from_two_ranks_to_four_to_one(ranks4, tmp_path):
    two, four, one = (Case(group_size=size, scheduler="cosine") for size in (2, None, 1))
    saved, _ = ranks4.run(_save, str(tmp_path), two)[2]  # by the second two ranks, as 1
    loaded = ranks4.run(_load, str(tmp_path / "1"), four, str(tmp_path / "four"))
    for rank, (state, _, texts, is_drawn) in enumerate(loaded):
        assert differences(state, saved, but_random=True) == []  # the first of the two, its buffers too
        warnings = [text for text in texts if "saved by 2 ranks and loaded by 4: random generators keep" in text]
        assert len(warnings) == (rank == 0)
        assert not is_drawn
    for state, *_ in ranks4.run(_load, str(tmp_path / "four"), one):
        assert differences(state, saved, but_random=True) == []


OTHER_DIMS = {"embed.weight", "head.weight"} | {
    f"blocks.{i}.{name}" for i in (0, 1) for name in ("up.weight", "experts", "mixers")
}


def test_from_two_ranks_to_four_to_three_that_shard_other_dimensions(ranks4, tmp_path):
    two, four, three = (Case(group_size=size, build=OddRows) for size in (2, None, 3))
    saved, dims = ranks4.run(_save, str(tmp_path), two)[0]
    assert {name for name, dim in dims.items() if dim} == OTHER_DIMS
    assert set(dims.values()) == {0, 1, 2}
    for state, of_four, *_ in ranks4.run(_load, str(tmp_path / "0"), four, str(tmp_path / "four")):
        assert differences(state, saved, but_random=True) == []
        assert of_four == dims
    for state, of_three, *_ in ranks4.run(_load, str(tmp_path / "four"), three)[:3]:
        assert differences(state, saved, but_random=True) == []
        assert {name for name, dim in of_three.items() if dim} == {"blocks.0.down.weight", "blocks.1.down.weight"}


DIM_0 = {"zeroamp": {"shard_dim": 0}}
CHANGES = {
    "stage 0 to 3": (Case(stage=0, group_size=2), Case(stage=3)),
    "stage 3 to 0": (Case(stage=3, optimizer="momentum"), Case(stage=0, group_size=2, optimizer="momentum")),
    "HSDP to 1-D": (Case(mesh_shape=(2, 2), optimizer="two groups"), Case(group_size=2, optimizer="two groups")),
    "autocast to fp32": (Case(), Case(group_size=1, options={"dtype": None})),
    "planned to dimension 0": (Case(group_size=2, build=OddRows), Case(build=OddRows, options=DIM_0)),
}


@pytest.mark.parametrize("change", slow_but(CHANGES, "HSDP to 1-D"))
def test_other_stages_meshes_and_dimensions(ranks4, tmp_path, change):
    before, after = CHANGES[change]
    saved, _ = ranks4.run(_save, str(tmp_path), before)[0]
    for state, *_ in ranks4.run(_load, str(tmp_path / "0"), after):
        assert differences(state, saved, but_random=True) == []


def _own_extra(folder):
    half = Case(group_size=2)
    Training(half).save(f"{folder}/{group_of(half)}", extra={"rows": torch.tensor([dist.get_rank()])})
    dist.barrier()
    folder += "/0"
    training = Training(Case(), seed=7)
    text, changed = refused(training, training.load, folder, extra_rank=2)
    return text, changed, training.load(folder, extra_rank=1), training.load(folder)


def test_extra_of_another_rank_is_chosen_or_the_first_rank_s(ranks4, tmp_path):
    for text, changed, chosen, first in ranks4.run(_own_extra, str(tmp_path)):
        assert changed == []
        assert re.search("CheckpointError: .*extra_rank must be one of the 2 ranks", text)
        assert (chosen["rows"], first["rows"]) == (torch.tensor([1]), torch.tensor([0]))
