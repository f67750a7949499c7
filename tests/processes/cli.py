"""Runs the command line in this process."""

from typer.testing import CliRunner

from zeroamp.cli.app import app


def run(*arguments):
    """Return (exit code, stdout, stderr); what a command raises, other than an exit, is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
