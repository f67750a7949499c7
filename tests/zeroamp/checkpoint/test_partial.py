"""Checkpoints loaded in part, with and without step counts; checkpoints and exports without frozen parameters."""

import pytest
import torch

import zeroamp
from tests.processes.checkpoint_training import Case, Small, Training, WithoutFrozen, differences, error_of, full

WITH_SCHEDULER = Case(scheduler="cosine")


def _loaded(folder, case, **options):
    """Return what differs, after a load in part, from the saved training and from this one before the load."""
    saved = Training(case).run(0, 3)
    saved.save(folder)
    training = Training(case, seed=7).run(0, 1)
    before = training.state()
    train = options.pop("train", True)
    zeroamp.load_checkpoint(folder, training.model, training.train if train else None, **options)
    after = training.state()
    from_saved = differences(after, saved.state(), but_random=True)
    return from_saved, differences(after, before, but_random=True), training.train.num_steps


def _kinds(names):
    kinds = {"optimizer": (".exp_avg", ".step", ".exp_avg_sq"), "scheduler": ("scheduler",), "groups": ("groups",),
             "counts": ("train",)}  # fmt: skip
    found = set()
    for name in names:
        key = name.partition(":")[0]
        found.add(next((kind for kind, ends in kinds.items() if key.endswith(ends)), "model"))
    return found


CASES = {
    "no optimizer": ({"load_optimizer_states": False}, {"optimizer"}, 3),
    "no scheduler": ({"load_lr_scheduler_states": False}, {"scheduler"}, 3),
    "model alone": ({"train": False}, {"optimizer", "scheduler", "groups", "counts"}, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_loaded_stays_as_it_was(ranks2, tmp_path, name):
    options, left, num_steps = CASES[name]
    for from_saved, from_before, found in ranks2.run(_loaded, str(tmp_path), WITH_SCHEDULER, **options):
        assert _kinds(from_saved) == left
        assert _kinds(from_before) >= {"model"}
        assert not _kinds(from_before) & (left - {"groups"})
        assert found == num_steps


def _next_learning_rates(folder):
    """A schedule that computes each learning rate from the one before, loaded without the optimizer."""
    saved = Training(WITH_SCHEDULER).run(0, 3)
    saved.save(folder)
    training = Training(Case(scheduler="cosine", optimizer="momentum"), seed=7)
    training.load(folder, load_optimizer_states=False)
    saved.run(3, 6)
    training.run(3, 6)
    return [entry[-1] for entry in saved.log[3:]], [entry[-1] for entry in training.log]


def test_a_schedule_goes_on_in_another_optimizer(ranks2, tmp_path):
    for expected, found in ranks2.run(_next_learning_rates, str(tmp_path)):
        assert found == expected


class OtherBase(Small):
    """Another frozen parameter than `Small` has."""

    def __init__(self):
        super().__init__()
        self.frozen.data += 1


class Unfrozen(Small):
    def __init__(self):
        super().__init__()
        self.frozen.requires_grad_(True)


def _without_frozen(folder):
    case = Case(optimizer="trainable only")
    saved = Training(case).run(0, 2)
    path = saved.save(f"{folder}/checkpoints", exclude_frozen_parameters=True)
    generator = torch.get_rng_state()
    training = Training(Case(optimizer="trainable only", build=OtherBase), seed=7)
    base = full(training.model.get_parameter("frozen"))
    training.load(path)
    differing = differences(training.state(), saved.state(), but_random=True)
    is_kept = torch.equal(full(training.model.get_parameter("frozen")), base)
    whole = Training(case, seed=7)  # the same base: training goes on bit for bit
    with torch.no_grad():
        whole.model.get_parameter("frozen").copy_(saved.model.get_parameter("frozen"))
    whole.load(path)
    gone_on = whole.run(2, 4).state()
    torch.set_rng_state(generator)  # of the dropout: both trainings draw from it
    gone_on = differences(gone_on, saved.run(2, 4).state(), but_random=True)
    errors = [error_of(Training(Case(build=build), seed=7).load, path) for build in (Unfrozen, WithoutFrozen)]
    return differing, is_kept, gone_on, errors


def test_frozen_parameters_can_be_left_out(ranks2, tmp_path):
    for differing, is_kept, gone_on, errors in ranks2.run(_without_frozen, str(tmp_path)):
        assert differing == ["frozen"]
        assert is_kept
        assert gone_on == []
        for error in errors:
            assert error.startswith("CheckpointError: ")
            assert "saved with exclude_frozen_parameters, without frozen, but in the model these are trainable" in error
