"""What importing the package brings, and that its names are there all the same."""

import json
import os
import pkgutil
import subprocess
import sys

import pytest

import zeroamp
from tests.measuring.sources import ROOT

HEAVY = [
    *("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.utils.tensorboard", "sympy"),
    *("matplotlib", "safetensors", "tensorboard", "tqdm", "transformers", "typer", "wandb"),
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


@pytest.fixture(scope="module")
def loaded():
    """Phase -> the heavy modules that are loaded after it."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", PHASES]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=environ)
    return json.loads(result.stdout)


def test_the_package_alone_imports_nothing_heavy_not_even_torch(loaded):
    assert loaded["package"] == []


def test_training_imports_no_more_heavy_modules_than_fsdp_does_itself(loaded):
    assert set(loaded["quick start"]) - set(loaded["fsdp"]) == {"pydantic", "tabulate"}


def test_no_public_name_imports_an_optional_package_or_the_compiler(loaded):
    assert set(loaded["all"]) - set(loaded["quick start"]) <= {"torch.distributed.checkpoint"}


def test_dir_lists_all_public_names():
    assert set(zeroamp.__all__) < set(dir(zeroamp))


def test_a_name_is_the_one_of_the_module_that_defines_it():
    from zeroamp.wrapping.wrap import wrap_model

    assert zeroamp.wrap_model is wrap_model


def test_a_wrong_name_is_an_attribute_error_with_the_nearest_in_reach():
    with pytest.raises(AttributeError, match="module 'zeroamp' has no attribute 'wrap_modle'") as raised:
        zeroamp.wrap_modle  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("wrap_modle", zeroamp)


def test_no_submodule_hides_a_public_name():
    assert not {module.name for module in pkgutil.iter_modules(zeroamp.__path__)} & set(zeroamp.__all__)


def test_type_checkers_see_what_is_imported_on_first_use():
    lines = (ROOT / "zeroamp" / "__init__.py").read_text().splitlines()
    seen = {line.split()[-1]: line.split()[1] for line in lines if line.startswith("    from zeroamp")}
    assert seen == zeroamp._HOMES
