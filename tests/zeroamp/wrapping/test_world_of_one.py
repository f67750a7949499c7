"""A script that no launcher started trains in one process."""

import pytest
import torch

import zeroamp
from tests.processes.launch import completed
from tests.processes.training import config

SCRIPT = """
import logging
import torch
import zeroamp

logging.basicConfig(level=logging.INFO, format="%(message)s")
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
model.load_state_dict(plain.state_dict())
cfg = {"zero_optimization": {"stage": 3}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
model = zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg))
train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))
optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
x = torch.randn(3, 4)
for _ in range(3):
    train.backward(model(x).float().square().mean())
    train.step()
    with torch.autocast("cpu", torch.bfloat16):
        loss = plain(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
ours = [parameter.full_tensor() for parameter in model.parameters()]
print("same bits:", all(map(torch.equal, ours, plain.parameters())))
"""
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")


def test_a_plain_script_trains_like_plain_torch_and_ends_cleanly(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    done = completed("-W", "error", "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same bits: True\n"
    assert done.stderr.count("a process group of one rank") == 1
    assert "rror" not in done.stderr
    assert "destroy" not in done.stderr


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_one_of_several_processes_without_a_rank_is_an_error(monkeypatch, name):
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    policy = zeroamp.policy_from_config(config(3))
    monkeypatch.setenv("PMI_SIZE", "")  # an empty variable is an unset one
    monkeypatch.setenv(name, "2")
    found = f"wrap_model found no process group and no RANK in the environment, but {name} is 2"
    with pytest.raises(zeroamp.WrapError, match=rf"^{found}.*Start the script with torchrun"):
        zeroamp.wrap_model(torch.nn.Linear(4, 8), policy)
    assert not torch.distributed.is_initialized()


def test_a_mesh_that_is_none_is_refused():
    with pytest.raises(zeroamp.WrapError, match=r"mesh=\) must be a torch.distributed.DeviceMesh, but is 2\. Pass one"):
        zeroamp.wrap_model(torch.nn.Linear(1, 1), config(3), mesh=2)
