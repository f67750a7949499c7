"""`MicroBatchSampler`: assigns samples to micro-batches in the same way on any number of ranks."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from zeroamp.policies.errors import StepError
from zeroamp.reproducible.order import micro_batch_indices
from zeroamp.reproducible.seeds import seed_of
from zeroamp.training.step import TrainStep
from zeroamp.wrapping.state import wrap_state


class MicroBatchSampler(Sampler[list[int]]):
    """A batch sampler for `torch.utils.data.DataLoader`: the samples of each micro-batch of this rank.

    With G micro-batches of B samples in an optimizer step, over all ranks, the micro-batch of index i in step s of an
    epoch has the samples (s G + i) B to (s G + i + 1) B - 1 of the epoch's order. So an optimizer step has the same
    micro-batches on any number of ranks, if G is the same. At the end of an epoch fewer than G B samples are left,
    which this epoch does not use.

    Iteration begins at the optimizer step that `train` takes next, and ends with its epoch. So after `load_checkpoint`
    the loop continues where it stopped, also on another number of ranks::

        sampler = zeroamp.MicroBatchSampler(train, data, micro_batch_size=4)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
        while train.num_steps < num_steps:
            for batch in loader:  # the rest of an epoch
                train.backward(model(**batch).loss)
                train.step()
    """

    def __init__(
        self, train: TrainStep, data: Sized, micro_batch_size: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        """Take the order of micro-batches from `train`.

        Args:
            train: the loop's `TrainStep`, which counts the optimizer steps.
            data: the dataset. Only its length is read.
            micro_batch_size: samples per micro-batch.
            shuffle: whether to shuffle each epoch, by a generator seeded with `seed` and the epoch's number. If False,
                samples are in the order of the dataset.
            seed: seed of the shuffles. Pass the same on all ranks.

        Raises:
            StepError: `data` has too few samples for one optimizer step, `micro_batch_size` is below 1, or the mesh has
                a context axis.
        """
        super().__init__()
        axes = wrap_state(train.model).axes
        if axes.num_context > 1:
            raise StepError(
                f"MicroBatchSampler deals different samples to all {axes.fsdp.size()} ranks that average gradients, "
                f"but the {axes.num_context} ranks of a context axis ({axes.describe()}) need the same ones. Use "
                'DistributedSampler(data, mesh["dp"].size(), mesh["dp"].get_local_rank()).'
            )
        if micro_batch_size < 1:
            raise StepError(f"micro_batch_size of MicroBatchSampler must be 1 or more, but is {micro_batch_size}.")
        num_ranks, per_rank = axes.fsdp.size(), len(micro_batch_indices(train))
        self._train = train
        self._num_samples = len(data)
        self._micro_batch_size = micro_batch_size
        self._per_step = num_ranks * per_rank * micro_batch_size
        self._shuffle, self._seed = shuffle, seed
        self.steps_per_epoch: int = self._num_samples // self._per_step
        """Optimizer steps of an epoch."""
        if self.steps_per_epoch == 0:
            raise StepError(
                f"MicroBatchSampler was given {self._num_samples} samples, but an optimizer step takes "
                f"{self._per_step}: {num_ranks} ranks x {per_rank} micro-batches x {micro_batch_size} samples. "
                "Use fewer micro-batches, smaller ones, or more data."
            )

    @property
    def _next_step(self) -> int:
        return self._train.num_steps + self._train.num_skipped

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches that are left in the epoch."""
        return (self.steps_per_epoch - self._next_step % self.steps_per_epoch) * len(micro_batch_indices(self._train))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample indices of this rank's micro-batches, from the next optimizer step to its epoch's end."""
        epoch, first = divmod(self._next_step, self.steps_per_epoch)
        samples = torch.arange(self._num_samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(seed_of(self._seed, epoch, 0))
            samples = torch.randperm(self._num_samples, generator=generator)
        size = self._micro_batch_size
        for step in range(first, self.steps_per_epoch):
            for index in micro_batch_indices(self._train):
                start = step * self._per_step + index * size
                yield samples[start : start + size].tolist()
