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


def _dealt(num_ranks, **more):
    """The micro-batches of two samples that all ranks get of 50 samples, four in each optimizer step."""
    trains = [_train(num_ranks, rank, 4 // num_ranks, **more) for rank in range(num_ranks)]
    samplers = [zeroamp.MicroBatchSampler(train, range(50), 2, seed=3) for train in trains]
    assert all(len(list(sampler)) == len(sampler) for sampler in samplers)
    return sorted(samples for sampler in samplers for samples in sampler)


def test_each_epoch_deals_each_sample_once():
    """`test_resume.py` compares their order."""
    first, second = _dealt(1), _dealt(1, num_steps=6)
    used = [sample for samples in first for sample in samples]
    assert len(set(used)) == len(used) == 48, "2 are left over"
    assert _dealt(2) == _dealt(4) == first != second
    in_order = list(zeroamp.MicroBatchSampler(_train(1, 0, 2), range(10), 2, shuffle=False))
    assert in_order == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_too_few_samples_and_an_empty_micro_batch_are_refused():
    train = _train(2, 0, 4)
    with pytest.raises(
        zeroamp.StepError, match="15 samples, but an optimizer step takes 16: 2 ranks x 4 micro-batches"
    ):
        zeroamp.MicroBatchSampler(train, range(15), 2)
    with pytest.raises(zeroamp.StepError, match="micro_batch_size"):
        zeroamp.MicroBatchSampler(train, range(15), 0)
