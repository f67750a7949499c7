"""Runs the command line in this process."""

import logging
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from zeroamp.cli.app import main


def run(*arguments):
    """Return (exit code, stdout, stderr); what a command raises, other than an exit, is raised."""
    code, out, err, logger = 0, StringIO(), StringIO(), logging.getLogger("zeroamp")
    logger.addHandler(logging.lastResort)  # writes warnings to stderr, except that pytest's handlers replace it
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main([str(argument) for argument in arguments])
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        logger.removeHandler(logging.lastResort)
    return code, out.getvalue(), err.getvalue()
