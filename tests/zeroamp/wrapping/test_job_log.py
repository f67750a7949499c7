"""Each message is printed once per job, also in a script that configures no logging; a user's configuration stays."""

import logging
import re
from unittest import mock

import pytest
import torch

import zeroamp
from tests.measuring.logs import log_lines
from tests.processes.launch import torchrun
from zeroamp.hooks.collectives import tree_sum

SCRIPT = """
import logging
import sys
import torch
import torch.distributed as dist
import zeroamp
import zeroamp.deepspeed as deepspeed

dist.init_process_group("gloo")
root, zeroamps = logging.getLogger(), logging.getLogger("zeroamp")
cfg = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "steps_per_print": 2}
for is_configured in (True, False):
    if is_configured:
        logging.basicConfig(format="mine: %(message)s")
    before = [(log.level, list(log.handlers)) for log in (root, zeroamps)]
    torch.manual_seed(0)
    model = zeroamp.wrap_model(torch.nn.Sequential(torch.nn.Linear(4, 8)), zeroamp.policy_from_config(cfg))
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        train.backward(model(torch.ones(3, 4)).mean().bfloat16())  # a warning
        train.step()
    deepspeed.utils.log_dist("of each rank")
    unchanged = before == [(log.level, log.handlers) for log in (root, zeroamps)]
    assert unchanged is is_configured
    logging.basicConfig(format="late: %(message)s", force=True)
    zeroamps.warning("the last")
    root.handlers.clear()  # as before any configuration
    dist.barrier()
    if is_configured and dist.get_rank() == 0:
        print("unconfigured from here", file=sys.stderr, flush=True)
    dist.barrier()
dist.destroy_process_group()
"""

MESSAGES = {
    "the size": r"^(.*)wrapped Sequential in",
    "steps": r"^(.*)step \d: loss .* lr 0\.1$",
    "a warning": r"^(.*)TrainStep.backward got a loss in bf16",
    "of each rank": r"^(.*)\[Rank \d\] of each rank",
    "after the user configured logging": r"^(.*)the last",
}
OURS, WARNING = "[zeroamp] INFO: ", "[zeroamp] WARNING: "
EXPECTED = [[[], [], ["mine: "], [], ["late: "]], [[OURS], [OURS] * 2, [WARNING], [OURS] * 2, ["late: "]]]
"""What is before each message: where the user configured logging, and where not."""


@pytest.mark.slow
def test_each_message_is_printed_once_per_job(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    output = torchrun(script)
    found = [
        {name: re.findall(pattern, part, re.MULTILINE) for name, pattern in MESSAGES.items()}
        for part in output.split("unconfigured from here\n")
    ]
    assert found == [dict(zip(MESSAGES, each, strict=True)) for each in EXPECTED], output


def _lines_where_triton_fails():
    torch.manual_seed(0)
    kernel = mock.Mock(side_effect=RuntimeError("Failed to find C compiler"))
    with (
        mock.patch.object(tree_sum, "_has_kernel", side_effect=lambda _device: tree_sum._failure is None),
        mock.patch.object(tree_sum, "_kernel", return_value=kernel),
        mock.patch.object(tree_sum, "_failure", None),
        log_lines(logging.WARNING) as lines,
    ):
        zeroamp.wrap_model(torch.nn.Linear(4, 8), zeroamp.policy_from_config({"bf16": {"enabled": True}}))
    return [call.args[0].shape[0] for call in kernel.call_args_list], lines


def test_every_rank_that_cannot_compile_the_sum_logs_one_warning(ranks2):
    for tried, lines in ranks2.run(_lines_where_triton_fails):
        assert tried == [2]  # stage 0 sums replicas
        assert [line for line in lines if "Failed to find C compiler" in line and "same bits" in line] == lines
        assert len(lines) == 1
