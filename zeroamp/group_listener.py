"""What is told of each group while FSDP2's schedule is replayed."""

from typing import Protocol


class GroupListener(Protocol):
    """Is told what a replay does with each group, in the order in which FSDP2 does it."""

    def gather_started(self, group: str) -> None:
        """The all-gather was started."""

    def gather_ended(self, group: str, *, in_forward: bool) -> None:
        """It was waited for: the unsharded parameters are there."""

    def gather_dropped(self, group: str) -> None:
        """It was started, and nobody needed it."""

    def released(self, group: str, *, in_forward: bool) -> None:
        """The unsharded parameters are gone."""

    def backward_ended(self, group: str, *, reduces: bool) -> None:
        """All gradients of a trainable group are there; they are reduced now or kept."""


class _Deaf:
    """Listens to nothing."""

    def gather_started(self, group: str) -> None:
        pass

    def gather_ended(self, group: str, *, in_forward: bool) -> None:
        pass

    def gather_dropped(self, group: str) -> None:
        pass

    def released(self, group: str, *, in_forward: bool) -> None:
        pass

    def backward_ended(self, group: str, *, reduces: bool) -> None:
        pass


DEAF: GroupListener = _Deaf()
"""Listens to nothing."""
