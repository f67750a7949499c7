"""Makes process groups of parts of the ranks.

Checked on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch.distributed as dist


def group_of_parts(
    parts: Iterable[Sequence[int]], timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Make one process group for each part of the ranks, and return the group of this rank's part.

    All ranks of all parts must call this with the same parts, which have no rank in common. If the parts have all ranks
    of the job, torch gives each group the same name on all ranks. Otherwise only this rank's part gets a group, which
    torch names by its ranks and by the number of groups that the caller is in. That number must be equal within a part:
    see docs/limits.md.
    """
    of_ranks = [sorted(part) for part in parts]
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
