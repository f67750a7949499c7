"""Part of an open file as a file of its own."""

from io import IOBase
from typing import IO, cast

from torch.distributed.checkpoint.utils import _create_file_view


def part_of_file(file: IO[bytes], start: int, num_bytes: int) -> IO[bytes]:
    """Return `num_bytes` of a file from the byte `start` on, as a file, without a copy.

    Reading the result moves the position in the file.
    """
    return cast(IO[bytes], _create_file_view(cast(IOBase, file), start, num_bytes))
