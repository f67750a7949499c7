"""Another number of ranks, another stage, another mesh: the same full tensors, bit for bit."""

import logging
import re

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.measuring.logs import log_lines
from tests.processes.checkpoint_training import Case, Training, differences, error_of, full, group_of
from tests.selection import slow_but


def _save(folder, case):
    """Save as group number N to folder/N."""
    training = Training(case).run(0, 2)
    training.save(f"{folder}/{group_of(case)}", extra={"at": 2})
    return training.state()


def _load(folder, case, save_to=None):
    training = Training(case, seed=7).run(0, 1)
    generators = torch.get_rng_state()
    with log_lines(logging.INFO) as texts:
        extra = training.load(folder)
    assert extra == {"at": 2}
    assert torch.equal(generators, torch.get_rng_state())  # of ranks that were not there
    if save_to is not None:
        training.save(save_to, extra=extra)
    state = training.state()
    training.run(2, 3)
    return state, texts


def _difference(ours, theirs):
    return [text for text in differences(ours, theirs) if not text.startswith("random")]


def test_from_two_ranks_to_four_to_one(ranks4, tmp_path):
    two, four, one = (Case(group_size=size, scheduler="cosine") for size in (2, None, 1))
    saved = ranks4.run(_save, str(tmp_path), two)[2]  # by the second two ranks, as 1
    for rank, (state, texts) in enumerate(ranks4.run(_load, str(tmp_path / "1"), four, str(tmp_path / "four"))):
        assert _difference(state, saved) == []  # the first of the two, its buffers too
        warnings = [text for text in texts if "saved by 2 ranks and loaded by 4: random generators keep" in text]
        assert len(warnings) == (rank == 0)
    for state, _ in ranks4.run(_load, str(tmp_path / "four"), one):
        assert _difference(state, saved) == []


CHANGES = {
    "stage 3 to 2": (Case(stage=3), Case(stage=2, group_size=2)),
    "stage 1 to 3": (Case(stage=1, group_size=2), Case(stage=3)),
    "stage 0 to 3": (Case(stage=0, group_size=2), Case(stage=3)),
    "stage 3 to 0": (Case(stage=3, optimizer="momentum"), Case(stage=0, group_size=2, optimizer="momentum")),
    "HSDP to 1-D": (Case(mesh_shape=(2, 2), optimizer="two groups"), Case(group_size=2, optimizer="two groups")),
    "1-D to HSDP": (Case(group_size=2), Case(mesh_shape=(2, 2))),
    "autocast to fp32": (Case(), Case(group_size=1, options={"dtype": None})),
}


@pytest.mark.parametrize("change", slow_but(CHANGES, "HSDP to 1-D"))
def test_other_stages_and_meshes(ranks4, tmp_path, change):
    before, after = CHANGES[change]
    saved = ranks4.run(_save, str(tmp_path), before)[0]
    for state, _ in ranks4.run(_load, str(tmp_path / "0"), after):
        assert _difference(state, saved) == []


def _change_stage_alone(folder, stages):
    """With as many ranks, each goes on with its own buffers, generators and extra."""
    saved = Training(Case(stage=stages[0])).run(0, 2)
    saved.save(folder, extra=dist.get_rank())
    state = saved.state()
    loaded = Training(Case(stage=stages[1]), seed=7).run(0, 1)
    with log_lines(logging.INFO) as texts:
        extra = loaded.load(folder)
    return differences(loaded.state(), state), extra, texts


@pytest.mark.parametrize("stages", slow_but([(3, 2), (1, 3), (0, 3), (2, 0)], (3, 2), (0, 3)))
def test_another_stage_on_as_many_ranks_keeps_what_is_each_rank_s_own(ranks2, tmp_path, stages):
    for rank, (found, extra, texts) in enumerate(ranks2.run(_change_stage_alone, str(tmp_path), stages)):
        assert found == []
        assert extra == rank
        assert len(texts) == (rank == 0)


def _own_extra(folder):
    half = Case(group_size=2)
    Training(half).save(f"{folder}/{group_of(half)}", extra={"rows": torch.tensor([dist.get_rank()])})
    dist.barrier()
    folder += "/0"
    training = Training(Case(), seed=7)
    before = training.state()
    text = error_of(training.load, folder, extra_rank=2)
    changed = [text for text in differences(training.state(), before) if not text.startswith("random")]
    return text, changed, training.load(folder, extra_rank=1), training.load(folder)


def test_extra_of_another_rank_is_chosen_or_the_first_rank_s(ranks4, tmp_path):
    for text, changed, chosen, first in ranks4.run(_own_extra, str(tmp_path)):
        assert changed == []
        assert re.search("CheckpointError: .*extra_rank must be one of the 2 ranks", text)
        assert (chosen["rows"], first["rows"]) == (torch.tensor([1]), torch.tensor([0]))


def _model_alone(folder):
    saved = Training(Case()).run(0, 2)
    saved.save(folder)
    loaded = Training(Case(), seed=7).run(0, 1)
    before = loaded.state()[1]
    zeroamp.load_checkpoint(folder, loaded.model)
    ours, theirs = (training.model.state_dict() for training in (loaded, saved))
    differing = [name for name in theirs if not torch.equal(full(ours[name]), full(theirs[name]))]
    values = loaded.state()[1]
    return differing, [key for key in values if key != "random" and values[key] != before[key]]


def test_the_model_alone(ranks2, tmp_path):
    assert ranks2.run(_model_alone, str(tmp_path)) == [([], [])] * 2
