"""Makes process groups of parts of the ranks.

Checked on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

K = TypeVar("K")
V = TypeVar("V")
_made: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], dist.ProcessGroup]]" = WeakKeyDictionary()
"""Default group -> arguments of `group_of_parts` -> this rank's group."""


def of_default_group(cache: "WeakKeyDictionary[dist.ProcessGroup, dict[K, V]]") -> dict[K, V]:
    """Return the entries that a cache has for the present default process group, to read and to fill.

    Entries for other default groups are removed: these were destroyed, and all groups made beside them.
    """
    if (world := dist.group.WORLD) is None:
        raise AssertionError("expected an initialised process group")
    if world not in cache:
        cache.clear()
    return cache.setdefault(world, {})


def group_of_parts(
    parts: Iterable[Sequence[int]], timeout: timedelta | None = None, backend: str | None = None, *, use: str
) -> dist.ProcessGroup:
    """Return the process group of this rank's part of the ranks, after making one for each part.

    Calls with the same arguments share a group: all models of a process, for example. NCCL's buffers of a group take
    memory on the device.

    All ranks of all parts must call this with the same arguments. The parts have no rank in common. If the parts have
    all ranks of the job, torch gives each group the same name on all ranks. Otherwise only this rank's part gets a
    group, which torch names by its ranks and by the number of groups that the caller is in. That number must be equal
    within a part: see docs/limits.md.

    Args:
        parts: global ranks of each part.
        timeout: of each collective. None: torch's default.
        backend: None: torch's default.
        use: what the group is for. Collectives of different uses may overlap, so each has a group of its own.
    """
    of_ranks = [sorted(part) for part in parts]
    made = of_default_group(_made)
    key = tuple(map(tuple, of_ranks)), timeout, backend, use
    if key not in made:
        made[key] = _make(of_ranks, timeout, backend)
    return made[key]


def _make(of_ranks: list[list[int]], timeout: timedelta | None, backend: str | None) -> dist.ProcessGroup:
    if sum(map(len, of_ranks)) == dist.get_world_size():
        own, _ = dist.new_subgroups_by_enumeration(of_ranks, timeout, backend)  # type: ignore[no-untyped-call]
    else:
        members = next(part for part in of_ranks if dist.get_rank() in part)
        with _own_communicators():
            own = dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=True)
    return cast(dist.ProcessGroup, own)


@contextmanager
def _own_communicators() -> Iterator[None]:
    """Let NCCL make communicators of new groups by themselves, at their first use.

    If `init_process_group` was given a `device_id`, torch splits them off that of the default group, in a collective of
    all ranks of the job. Ranks that are in no new group would not take part in it.
    """
    default = dist.group.WORLD
    device = getattr(default, "bound_device_id", None)
    if device is None:
        yield
        return
    default.bound_device_id = None  # type: ignore[union-attr]
    try:
        yield
    finally:
        default.bound_device_id = device  # type: ignore[union-attr]
