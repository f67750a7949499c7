"""What zeroamp logs."""

import logging
from contextlib import contextmanager


@contextmanager
def log_lines(level=logging.WARNING):
    """The messages that zeroamp logs inside, from this level on."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("zeroamp")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
