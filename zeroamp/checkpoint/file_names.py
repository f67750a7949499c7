"""The names of a checkpoint's files, apart from its manifest and the shards, which torch names."""

METADATA = ".metadata"
"""Torch's, of the shards."""
VALUES = "train.pt"
"""What is the same on all ranks."""


def rank_file(rank: int) -> str:
    """Return the name of the file with what one rank has of its own."""
    return f"rank_{rank:05d}.pt"
