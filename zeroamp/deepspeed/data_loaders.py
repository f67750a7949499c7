"""The data loader of `initialize(training_data=)`, and `RepeatingLoader`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


def data_loader(
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool,
    pin_memory: bool = True,
    sampler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    num_workers: int = 0,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """Return a loader that gives each rank its own part of a dataset.

    torch's `DistributedSampler` selects the part. Its order is the same in every epoch unless
    `loader.sampler.set_epoch(epoch)` is called. `loader.data_sampler`, DeepSpeed's name, is the same sampler.
    An iterable dataset must select its part itself.

    Args:
        dataset: map-style or iterable.
        batch_size: samples of a micro-batch. The last one may be smaller.
        shuffle: whether the sampler shuffles the samples.
        pin_memory: has no effect without an accelerator.
        sampler: replaces the `DistributedSampler`.
        collate_fn: of the loader.
        num_workers: processes of the loader.
        drop_last: whether to leave out a smaller last micro-batch.
    """
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, dist.get_world_size(), dist.get_rank(), shuffle=shuffle)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=num_workers,
        drop_last=drop_last,
        pin_memory=pin_memory and torch.accelerator.is_available(),
    )
    vars(loader)["data_sampler"] = loader.sampler  # DeepSpeed's name
    return loader


class RepeatingLoader:
    """Yields the batches of a loader without end: it starts again after the last one."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
