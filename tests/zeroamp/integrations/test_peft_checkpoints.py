"""Checkpoints without the frozen base: adapters and their optimizer state alone, and an exact resume."""

import pytest
from torch.distributed.checkpoint import FileSystemReader

import zeroamp
from tests.models.adapters import Adapted, quietly, train_in_one_process
from tests.processes.adapter_training import AdapterTraining
from tests.processes.training import same_bits
from tests.selection import needs_bitsandbytes

pytest.importorskip("peft", reason="peft is not installed: it makes the adapters")


@quietly
def _saved(adapted, folder, first=None):
    """Load if there is something to load, train two steps, save. Returns losses, norms and parameters."""
    training = AdapterTraining(adapted)
    if first is not None:
        zeroamp.load_checkpoint(folder, training.model, training.train)
    training.run(2, first or 0)
    zeroamp.save_checkpoint(folder, training.model, training.train, exclude_frozen_parameters=True)
    return training.losses, training.norms, training.parameters()


def _check(answers, oracle, steps):
    losses, norms, _, _ = oracle
    for rank, (found, found_norms, _) in enumerate(answers):
        assert found == [of_ranks[rank] for of_ranks in losses[steps]]
        assert found_norms == norms[steps]


def test_a_resume_with_other_adapters_continues_bit_for_bit(ranks2, tmp_path):
    """The new process draws adapters of another seed; the base is built anew."""
    needs_bitsandbytes()
    base = "nf4 uint8"
    oracle = quietly(train_in_one_process)(Adapted(base=base), [2, 2, 2, 2])
    _check(ranks2.run(_saved, Adapted(base=base), tmp_path), oracle, slice(0, 2))
    answers = ranks2.run(_saved, Adapted(base=base, seed=7), tmp_path, first=4)
    _check(answers, oracle, slice(2, 4))
    for *_, parameters in answers:
        assert same_bits(parameters, oracle[2]) == []
    for path in tmp_path.glob("step_*"):
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        assert saved
        assert all(".lora_" in name for name in saved)
