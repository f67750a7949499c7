"""What importing the package and training bring, and that its names are there all the same."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zeroamp
import zeroamp.deepspeed
from tests.measuring.sources import ROOT

HEAVY = [
    *("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.utils.tensorboard", "sympy"),
    *("matplotlib", "safetensors", "tensorboard", "transformers", "wandb"),
]
WITH_TORCH = ["torch", "numpy", "pydantic", "tabulate"]

PHASES = f"""
import json, sys

def heavy():
    return [name for name in {[*WITH_TORCH, *HEAVY]} if name in sys.modules]

found = {{}}
import zeroamp, zeroamp.checkpoint, zeroamp.deepspeed, zeroamp.weights
found["package"] = heavy()
import torch, torch.distributed.fsdp
found["fsdp"] = heavy()
from zeroamp import TrainStep, explain, policy_from_config, wrap_model
found["quick start"] = heavy()
from zeroamp import *
found["all"] = heavy()
print(json.dumps(found))
"""


CORE = ("policies", "hooks", "planning", "wrapping", "training", "ledger", "version")

OFF = ("zeroamp.hooks._torch.all_gather_extension",)
"""Parts of the core that only a config key loads."""

REFUSE = f"""
import sys

class Refuse:
    def find_spec(name, path=None, target=None):
        if name.startswith("zeroamp.") and name.split(".")[1] not in {CORE}:
            raise ImportError(name + " is outside of the core")

sys.meta_path.insert(0, Refuse)
"""

TRAIN = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
import zeroamp

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
config = {
    "zero_optimization": {"stage": 3},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zeroamp": {"reproducible": False},
}
policy = zeroamp.policy_from_config(config)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
model = zeroamp.wrap_model(model, policy, auto_wrap_policy={"Linear"})
train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.01))
losses = []
for _ in range(4):
    for _ in range(2):
        train.backward((model(torch.ones(2, 8)).float() - 3).square().mean())
        report = train.step()
    losses.append(report.loss)
ledger = zeroamp.explain(model)
repr(ledger)
ledger.verify(model, torch.ones(2, 8), loss_fn=lambda output: output.float().square().mean())
for is_last in (False, True):
    train.backward((model(torch.ones(2, 8)).float() - 3).square().mean(), is_last=is_last)
train.clip_grad_norm()
losses.append(train.update().loss)
modules = sorted(name for name in sys.modules if name.startswith("zeroamp."))
print(json.dumps({"losses": losses, "modules": modules}))
dist.destroy_process_group()
"""


def _run(script):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error", "-c", script]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240, env=environ)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def loaded():
    """Phase -> the heavy modules that are loaded after it."""
    return _run(PHASES)


def test_the_package_alone_imports_nothing_heavy_not_even_torch(loaded):
    assert loaded["package"] == []


def test_training_imports_no_more_heavy_modules_than_fsdp_does_itself(loaded):
    assert set(loaded["quick start"]) - set(loaded["fsdp"]) == {"pydantic"}


def test_no_public_name_imports_an_optional_package_or_the_compiler(loaded):
    assert set(loaded["all"]) - set(loaded["quick start"]) <= {"tabulate", "torch.distributed.checkpoint"}


def test_the_core_trains_where_nothing_else_can_be_imported():
    """The core trains and verifies its dtypes where nothing else can be imported."""
    found = _run(REFUSE + TRAIN)
    assert found["losses"][-1] < found["losses"][0]
    assert [name for name in found["modules"] if name.startswith(OFF)] == []


def test_dir_lists_the_public_names_and_nothing_else():
    assert dir(zeroamp) == sorted(["__version__", *zeroamp.__all__])


def test_a_wrong_name_is_an_attribute_error_with_the_nearest_in_reach():
    with pytest.raises(AttributeError, match="module 'zeroamp' has no attribute 'wrap_modle'") as raised:
        zeroamp.wrap_modle  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("wrap_modle", zeroamp)


@pytest.mark.parametrize("package", [zeroamp, zeroamp.deepspeed], ids=["zeroamp", "deepspeed"])
def test_the_stub_exports_each_public_name_from_the_module_that_defines_it(package):
    lines = Path(package.__file__).with_suffix(".pyi").read_text().splitlines()
    imports = sorted(line for line in lines if line.startswith("from zeroamp."))
    names = {line.split()[-1] for line in imports} | {line.split(":")[0] for line in lines if ": ModuleType" in line}
    assert names == {"__version__", *package.__all__, *getattr(package, "MODULES", ())}
    for line in imports:
        _, module, _, name, _, exported = line.split()  # "as" the same name exports it
        assert name == exported
        value = getattr(importlib.import_module(module), name)
        assert getattr(package, name) is value
        assert not isinstance(value, type) or value.__module__ == module or value.__name__ != name
