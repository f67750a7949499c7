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
import torch
import torch.distributed as dist
import zeroamp
import zeroamp.deepspeed as deepspeed

CONFIGURE
root, before = logging.getLogger(), [(log.level, list(log.handlers)) for log in (logging.getLogger(), LOGGER)]
dist.init_process_group("gloo")
torch.manual_seed(0)
cfg = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "steps_per_print": 2}
model = zeroamp.wrap_model(torch.nn.Sequential(torch.nn.Linear(4, 8)), zeroamp.policy_from_config(cfg))
train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    train.backward(model(torch.ones(3, 4)).mean().bfloat16())  # a warning
    train.step()
deepspeed.utils.log_dist("of each rank")
unchanged = before == [(log.level, log.handlers) for log in (root, LOGGER)]
logging.basicConfig(format="late: %(message)s", force=True)
LOGGER.warning("the last")
dist.destroy_process_group()
assert unchanged is EXPECTED, unchanged
""".replace("LOGGER", 'logging.getLogger("zeroamp")')

MESSAGES = {
    "the size": r"^(.*)wrapped Sequential in",
    "steps": r"^(.*)step \d: loss .* lr 0\.1$",
    "a warning": r"^(.*)TrainStep.backward got a loss in bf16",
    "of each rank": r"^(.*)\[Rank \d\] of each rank",
    "after the user configured logging": r"^(.*)the last",
}
OURS, WARNING = "[zeroamp] INFO: ", "[zeroamp] WARNING: "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configure", "expected"),
    [
        pytest.param("", [[OURS], [OURS] * 2, [WARNING], [OURS] * 2, ["late: "]], id="unconfigured"),
        pytest.param(
            "logging.basicConfig(format='mine: %(message)s')",
            [[], [], ["mine: "], [], ["late: "]],
            id="configured",
        ),
    ],
)
def test_each_message_is_printed_once_per_job(tmp_path, configure, expected):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("CONFIGURE", configure).replace("EXPECTED", str(configure != "")))
    output = torchrun(script)
    found = {name: re.findall(pattern, output, re.MULTILINE) for name, pattern in MESSAGES.items()}
    assert found == dict(zip(MESSAGES, expected, strict=True)), output


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
