"""Runs the command line in this process, and a small model for it."""

import logging
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from zeroamp.cli.app import main

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def batch(batch, seq):
    return torch.ones(batch, seq, 8)
"""


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
