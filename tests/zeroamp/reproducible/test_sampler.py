"""`MicroBatchSampler`: the samples of each micro-batch, whatever the number of ranks."""

from types import SimpleNamespace

import pytest

import zeroamp


@pytest.fixture(autouse=True)
def _no_context_axis(monkeypatch):
    """The model of a `TrainStep` below is its own state, with data-parallel ranks only."""
    monkeypatch.setattr("zeroamp.reproducible.sampler.wrap_state", lambda model: model)
    monkeypatch.setattr("zeroamp.reproducible.sampler.micro_batch_indices", lambda train: train.indices)


def _train(num_ranks, rank, per_rank, *, num_steps=0):
    """What the sampler reads of a `TrainStep`."""
    indices = range(rank, num_ranks * per_rank, num_ranks)
    axes = SimpleNamespace(num_context=1, fsdp=SimpleNamespace(size=lambda: num_ranks))
    return SimpleNamespace(
        model=SimpleNamespace(axes=axes),
        indices=indices,
        num_steps=num_steps,
        num_skipped=0,
    )


def _steps(num_ranks, per_rank, num_samples, size, **more):
    """[step][index of the micro-batch] -> samples, of all ranks."""
    steps = []
    for rank in range(num_ranks):
        train = _train(num_ranks, rank, per_rank, **more)
        sampler = zeroamp.MicroBatchSampler(train, range(num_samples), size, seed=3)
        dealt = list(sampler)
        assert len(dealt) == len(sampler)
        for number, samples in enumerate(dealt):
            step, place = divmod(number, per_rank)
            while len(steps) <= step:
                steps.append({})
            steps[step][train.indices[place]] = samples
    return [[step[index] for index in range(num_ranks * per_rank)] for step in steps]


def test_every_number_of_ranks_deals_the_same_micro_batches_and_each_sample_once():
    expected = _steps(1, 8, 100, 3)
    assert len(expected) == 4  # of 24 samples each; 4 are left over
    used = [sample for step in expected for samples in step for sample in samples]
    assert len(set(used)) == len(used) == 96
    assert used != sorted(used)
    for num_ranks in (2, 4, 8):
        assert _steps(num_ranks, 8 // num_ranks, 100, 3) == expected


def test_iterating_goes_on_at_the_next_step_and_shuffles_each_epoch_anew():
    first = _steps(2, 2, 50, 3)
    assert _steps(2, 2, 50, 3, num_steps=3) == first[3:]
    second = _steps(2, 2, 50, 3, num_steps=4)
    assert len(second) == 4
    assert second != first
    train = _train(1, 0, 2)
    in_order = list(zeroamp.MicroBatchSampler(train, range(10), 2, shuffle=False))
    assert in_order == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_too_few_samples_and_an_empty_micro_batch_are_refused():
    train = _train(2, 0, 4)
    with pytest.raises(
        zeroamp.StepError, match="15 samples, but an optimizer step takes 16: 2 ranks x 4 micro-batches"
    ):
        zeroamp.MicroBatchSampler(train, range(15), 2)
    with pytest.raises(zeroamp.StepError, match="micro_batch_size"):
        zeroamp.MicroBatchSampler(train, range(15), 0)
