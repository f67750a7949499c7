"""Optimizers that need whole parameters or plain tensors, in a loop without `TrainStep`: right, or an error."""

import importlib
import re

import pytest
import torch
from torch import nn

import zeroamp
from tests.processes.training import config
from zeroamp.wrapping.optimizer_hooks import ELEMENTWISE

OTHER = torch.optim.Rprop
INPUTS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def _train(model, path):
    module, _, name = path.rpartition(".")
    optimizer = getattr(importlib.import_module(module), name)(model.parameters())
    for _ in range(3):
        model(INPUTS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _outcome(path, stage):
    model = zeroamp.wrap_model(
        _network(), zeroamp.policy_from_config(config(stage, dtype=None)), auto_wrap_policy={"Linear"}
    )
    try:
        _train(model, path)
    except zeroamp.StepError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("path", ["torch.optim.Adafactor", "transformers.optimization.Adafactor"])
def test_statistics_of_whole_parameters_are_refused_if_sharded(ranks2, path):
    words = r"A loop without TrainStep steps \w+'s Adafactor, which needs statistics of whole parameters"
    for error in ranks2.run(_outcome, path, 3):
        assert re.match(words, error), error


def test_bitsandbytes_names_train_step(ranks2):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    for error in ranks2.run(_outcome, "bitsandbytes.optim.AdamW8bit", 3):
        assert "kernels take plain tensors. Pass TrainStep(model, optimizer, on_shards=True)" in error


@pytest.mark.parametrize(("name", "stage"), [("Adafactor", 0), ("Rprop", 0), ("Rprop", 3)])
def test_operations_that_torch_lacks_on_dtensors_name_train_step(ranks2, name, stage):
    """Of torch's element-wise optimizers, only Rprop assigns to elements that a mask selects."""
    for error in ranks2.run(_outcome, f"torch.optim.{name}", stage):
        assert re.search(rf"torch's {name}, .* Call zeroamp.TrainStep\(model, optimizer\)", error), error


def _outcomes_of_elementwise():
    return {cls.__name__: _outcome(f"torch.optim.{cls.__name__}", 3) for cls in ELEMENTWISE if cls is not OTHER}


def test_all_other_elementwise_optimizers_update_dtensors(ranks2):
    for outcomes in ranks2.run(_outcomes_of_elementwise):
        assert len(outcomes) == len(ELEMENTWISE) - 1
        assert set(outcomes.values()) == {"no error"}, outcomes
