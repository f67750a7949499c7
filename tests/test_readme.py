"""The README's script, its output, and its three loops, which run on FSDP2 alone and on zeroamp."""

import re
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, mse_loss

import zeroamp
from tests.processes.launch import ROOT, torchrun
from tests.selection import SUMS_ARE_IN_FP32

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)([^\n]*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
(SCRIPT,) = (code for language, title, code in BLOCKS if language == "python" and not title)
(LOOPS,) = (code for language, title, code in BLOCKS if language == "python" and title)
CONFIG = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}
WIDTH = 16


def test_the_script_prints_what_the_readme_shows(tmp_path, monkeypatch):
    """Each line of the ledger is one that the script prints. Losses have other last digits on another CPU."""
    (shown,) = (code for language, title, code in BLOCKS if language == "text")
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("COLUMNS", "120")
    printed = torchrun(tmp_path / "train.py")
    *ledger, step = shown.splitlines()
    assert [line for line in ledger if line != "…" and line not in printed.splitlines()] == []
    (loss,) = _losses(printed)
    assert loss < 1, "at first it is log(256), 5.5"
    assert _losses(step) == pytest.approx([loss], abs=0.01)


def _losses(text):
    return [float(loss) for loss in re.findall(r"^step 20: loss (\S+), gradient norm", text, re.MULTILINE)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.mlp = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(block() for _ in range(4)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *of_blocks):
        for block in self.blocks:
            x = block(x, *of_blocks)
        return self.head(x)


def _on_fsdp2(model):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _on_zeroamp(model):
    return zeroamp.wrap_model(model, CONFIG)


def _run(shard):
    """Return what the loops print on this rank, and the error that ends them, or None."""
    torch.manual_seed(0)
    names = {"torch": torch, "nn": nn, "cross_entropy": cross_entropy, "mse_loss": mse_loss}
    names |= {"shard": shard, "Block": Block, "Model": Model}
    generator = torch.Generator().manual_seed(dist.get_rank())
    names |= {"inputs": torch.randn(8, WIDTH, generator=generator), "labels": torch.arange(8)}
    printed, error = StringIO(), None
    with redirect_stdout(printed):
        try:
            exec(compile(LOOPS, "README.md", "exec"), names)
        except zeroamp.StepError as raised:
            error = str(raised)
    return printed.getvalue().split(), error


def test_the_loops_print_what_the_readme_says(ranks2):
    """The comment of each print has both results: `# FSDP2: 0. zeroamp: 4`."""
    theirs, ours = zip(*re.findall(r"# FSDP2: (\S+)\. zeroamp: (\S+)$", LOOPS, re.MULTILINE), strict=True)
    assert len(theirs) == 3
    if SUMS_ARE_IN_FP32:
        theirs = [theirs[0], ours[1], theirs[2]]  # FSDP2 of torch 2.15 adds the micro-batches of the second in fp32
    for printed, error in ranks2.run(_run, _on_fsdp2):
        assert printed == list(theirs)
        assert error is None
    for printed, error in ranks2.run(_run, _on_zeroamp):
        assert [*printed, "StepError"] == list(ours)
        assert "the gradient of blocks.0.mlp.weight was not reduced" in error
