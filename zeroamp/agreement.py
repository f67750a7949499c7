"""What one rank cannot do, no rank goes on from: an error of one is raised on all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.policies.errors import CheckpointError

Result = TypeVar("Result")


def rank_in_mesh(mesh: DeviceMesh) -> int:
    """Return this rank's place among the ranks of `mesh`, from 0 on."""
    place = 0
    for axis in range(mesh.ndim):
        place = place * mesh.size(axis) + mesh.get_local_rank(axis)
    return place


def on_all(mesh: DeviceMesh, action: Callable[[], Result]) -> list[Result]:
    """Call `action` on every rank and return the results of all, in the order of `mesh`. One small collective per axis.

    Raises:
        CheckpointError: on all ranks where it raised on any, with the text of each.
    """
    error: Exception | None = None
    outcome: tuple[Result | None, str | None]
    try:
        outcome = action(), None
    except Exception as raised:
        error = raised
        outcome = None, str(raised) if isinstance(raised, CheckpointError) else f"{type(raised).__name__}: {raised}"
    outcomes: list[Any] = [outcome]
    for axis in reversed(range(mesh.ndim)):
        gathered: list[list[Any]] = [[] for _ in range(mesh.size(axis))]
        dist.all_gather_object(gathered, outcomes, group=mesh.get_group(axis))
        outcomes = [one for several in gathered for one in several]
    ranks_by_text: dict[str, list[int]] = {}
    for rank, (_, text) in enumerate(outcomes):
        if text is not None:
            ranks_by_text.setdefault(text, []).append(rank)
    if ranks_by_text:
        texts = [_on(ranks, len(outcomes)) + text for text, ranks in ranks_by_text.items()]
        raise CheckpointError("\n".join(texts)) from error
    return [result for result, _ in outcomes]


def on_first(mesh: DeviceMesh, action: Callable[[], Result]) -> Result:
    """Call `action` on the first rank of `mesh`, and return its result on all. Raises as `on_all` does."""
    is_first = rank_in_mesh(mesh) == 0
    return on_all(mesh, lambda: action() if is_first else None)[0]  # type: ignore[return-value]  # it did call it


def _on(ranks: list[int], num_ranks: int) -> str:
    return "" if len(ranks) == num_ranks else f"On rank {', '.join(map(str, ranks))} of {num_ranks}: "
