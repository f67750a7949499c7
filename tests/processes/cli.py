"""Runs the command line in this process."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from zeroamp.cli.app import main


def run(*arguments):
    """Return (exit code, stdout, stderr); what a command raises, other than an exit, is raised."""
    code, out, err = 0, StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code or 0
    return code, out.getvalue(), err.getvalue()
