"""`RankTree`: sends messages between the ranks of a gloo group along a binary tree.

A rank exchanges messages with its parent and two children. So it needs three connections, and a message passes
log2(ranks) ranks. Messages of gloo's own collectives pass through all ranks one after the other, and gloo's gathers
connect the first rank with all others.

[Note: A lost rank]
A rank that cannot reach another sends the number of the lost rank up and down the tree, before it raises. So all
remaining ranks raise at about the same time, not only the neighbours of the lost rank.
"""

import pickle
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_LOST = -1
_COMPRESSED_BYTES = 2**12  # messages of at least this size are compressed: names of thousands of tensors repeat


class LostRankError(RuntimeError):
    """A rank is lost, or did not answer within the timeout of the process group."""


class RankTree:
    """The ranks of a group as a binary tree: the children of rank r are 2r + 1 and 2r + 2. The root is rank 0.

    All ranks call the same methods in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.num_bytes_sent = 0
        """Bytes of objects that this rank has sent."""
        self.group = group
        self._parent = None if self.rank == 0 else (self.rank - 1) // 2
        self._children = [child for child in (2 * self.rank + 1, 2 * self.rank + 2) if child < self.num_ranks]

    def max(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of each value over the ranks. All ranks pass equally many 64-bit integers.

        Raises:
            LostRankError: on all remaining ranks, see [Note: A lost rank].
        """
        found = torch.tensor([0, *values], dtype=torch.int64)  # the first element: 1 + the number of a lost rank
        received = torch.empty_like(found)
        for child in self._children:
            if self._receive(received, child):
                torch.maximum(found, received, out=found)
            else:
                found[0] = child + 1
        if self._parent is not None and not (self._send(found, self._parent) and self._receive(found, self._parent)):
            found[0] = self._parent + 1
        for child in self._children:
            self._send(found, child)  # the loss of a child is noticed at the next message
        lost, *largest = found.tolist()
        if lost:
            raise self._lost(lost - 1)
        return largest

    def gather(self, value: Any) -> "list[Any] | LostRankError":
        """Return the values of all ranks, in rank order, on the root; [] on other ranks.

        If a rank is lost, the root returns the error, so that it can send it to all ranks.
        """
        found: dict[int, bytes] = {self.rank: _pack(value)}
        for child in self._children:
            content = self._receive_bytes(child)
            found |= {_LOST: b"%d" % child} if content is None else pickle.loads(content)
        if self._parent is not None:
            self._send_bytes(pickle.dumps(found), self._parent)  # the loss of the parent is noticed at its reply
            return []
        if _LOST in found:
            return self._lost(int(found[_LOST]))
        return [_unpack(found[rank]) for rank in range(self.num_ranks)]

    def broadcast(self, value: Any = None) -> Any:
        """Return the root's value on all ranks. Values on other ranks are ignored.

        Raises:
            LostRankError: the root passed a LostRankError, or a rank is lost.
        """
        content = _pack(value) if self._parent is None else self._receive_bytes(self._parent)
        if content is None:
            content = _pack(self._lost(self._parent or 0))
        for child in self._children:
            self._send_bytes(content, child)
        return _raised(value if self._parent is None else _unpack(content))

    def scatter(self, values: "Sequence[Any] | LostRankError" = ()) -> Any:
        """Return this rank's value out of the root's `values`, one per rank. Values on other ranks are ignored.

        Raises:
            LostRankError: the root passed a LostRankError, or a rank is lost.
        """
        if self._parent is None:
            of_ranks = [values] * self.num_ranks if isinstance(values, LostRankError) else values
            found = {rank: _pack(value) for rank, value in enumerate(of_ranks)}
        else:
            content = self._receive_bytes(self._parent)
            error = _pack(self._lost(self._parent))
            found = dict.fromkeys(range(self.num_ranks), error) if content is None else pickle.loads(content)
        for child in self._children:
            below = {rank: content for rank, content in found.items() if _is_below(rank, child)}
            self._send_bytes(pickle.dumps(below), child)
        return _raised(_unpack(found[self.rank]))

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on all ranks.

        Raises:
            LostRankError: a rank is lost.
        """
        values: list[Any] = self.broadcast(self.gather(value))
        return values

    def _send(self, tensor: torch.Tensor, rank: int) -> bool:
        """Send a tensor; return whether it was sent."""
        try:
            dist.send(tensor, group=self.group, group_dst=rank)
        except RuntimeError:  # gloo's error does not name the rank, but the caller's LostRankError does
            return False
        return True

    def _receive(self, tensor: torch.Tensor, rank: int) -> bool:
        """Receive a tensor in place; return whether it was received."""
        try:
            dist.recv(tensor, group=self.group, group_src=rank)
        except RuntimeError:
            return False
        return True

    def _send_bytes(self, content: bytes, rank: int) -> None:
        """Send bytes. The loss of the receiver is noticed later, when its answer is missing."""
        self.num_bytes_sent += len(content)
        if self._send(torch.tensor([len(content)]), rank):
            self._send(torch.frombuffer(bytearray(content), dtype=torch.uint8), rank)

    def _receive_bytes(self, rank: int) -> bytes | None:
        """Return the bytes that a rank sent; None if the rank is lost."""
        size = torch.empty(1, dtype=torch.int64)
        if not self._receive(size, rank):
            return None
        content = torch.empty(int(size), dtype=torch.uint8)
        return content.numpy().tobytes() if self._receive(content, rank) else None

    def _lost(self, rank: int) -> LostRankError:
        return LostRankError(f"rank {dist.get_global_rank(self.group, rank)} is lost or did not answer")


def _raised(value: Any) -> Any:
    if isinstance(value, LostRankError):
        raise value
    return value


def _is_below(rank: int, other: int) -> bool:
    """Return whether `rank` is `other` or below it in the tree."""
    while rank > other:
        rank = (rank - 1) // 2
    return rank == other


def _pack(value: Any) -> bytes:
    content = pickle.dumps(value)
    return b"z" + zlib.compress(content, 1) if len(content) >= _COMPRESSED_BYTES else b"p" + content


def _unpack(content: bytes) -> Any:
    body = content[1:]
    return pickle.loads(zlib.decompress(body) if content[:1] == b"z" else body)
