"""`reduce_scatter_input_buffers` and `separate_reduce_scatter_group`: in effect, and the same bits."""

import time
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import zeroamp
from tests.models.small import batch
from tests.processes.training import check_same_run, config, loss_of, train, wrapped
from tests.selection import needs_options, slow_but
from zeroamp.hooks._torch.fsdp import timeout_of
from zeroamp.hooks.collectives.gradient_reduction import GroupReduceScatter
from zeroamp.hooks.collectives.traffic import STEP
from zeroamp.wrapping import model_checks as device_support
from zeroamp.wrapping.state import wrap_state

MODEL = "llama_untied"
BOTH = {"reduce_scatter_input_buffers": 3, "separate_reduce_scatter_group": True}


def _train(stage, options, mesh_shape=None):
    return train(MODEL, config(stage, clip=0.5, accumulation=2, zeroamp=options), 3, mesh_shape=mesh_shape)


def _check(ranks, stage, mesh_shape=None):
    runs = (ranks.run(_train, stage, options, mesh_shape) for options in (BOTH, {}))
    for ours, theirs in zip(*runs, strict=True):
        check_same_run(ours, theirs)


@needs_options
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 1, 3))
def test_same_bits(ranks2, stage):
    _check(ranks2, stage)


@needs_options
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_same_bits_with_hybrid_sharding(ranks4, stage):
    _check(ranks4, stage, (2, 2))


def _num_alive(references, num_allowed):
    """Count storages. gloo's thread lets go of what it sent a moment after the collective: wait for that."""
    deadline = time.monotonic() + 10
    while (num := sum(not ref.expired() for ref in references)) > num_allowed and time.monotonic() < deadline:
        time.sleep(0.001)
    return num


class _ProcessGroups:
    def __init__(self):
        self.all_gathers, self.reductions = set(), set()

    def on_collective(self, issued):
        if issued.group_name != STEP:
            (self.all_gathers if issued.collective == "all_gather" else self.reductions).add(issued.process_group)


def _step(options):
    """Return the most inputs of reductions at one time, and of gathers' and reductions' groups: whether they are one,
    and whether they wait equally long."""
    model = wrapped(MODEL, config(zeroamp=options))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    groups = _ProcessGroups()
    wrap_state(model).listeners.append(groups)
    allocate, inputs, alive = GroupReduceScatter.allocate, [], []

    def watched(self, size, *, dtype, device):
        tensor = allocate(self, size, dtype=dtype, device=device)
        if self._pending_input is not None:
            inputs.append(StorageWeakRef(tensor.untyped_storage()))
            alive.append(_num_alive(inputs, options.get("reduce_scatter_input_buffers", 1)))
        return tensor

    with patch.object(GroupReduceScatter, "allocate", watched):
        step.backward(loss_of(model, batch(MODEL, 0)))
    step.step()
    (gathers,), (reductions,) = groups.all_gathers, groups.reductions
    return max(alive), gathers is reductions, timeout_of(gathers, "cpu") == timeout_of(reductions, "cpu")


@needs_options
@pytest.mark.parametrize(("options", "expected"), [({}, (1, True, True)), (BOTH, (3, False, True))])
def test_they_are_in_effect(ranks2, options, expected):
    assert ranks2.run(_step, options) == [expected] * 2


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"reduce_scatter_input_buffers": 2}, "zeroamp.reduce_scatter_input_buffers"),
        ({"separate_reduce_scatter_group": True}, "zeroamp.separate_reduce_scatter_group"),
    ],
)
def test_an_older_torch_is_refused_by_key(monkeypatch, options, key):
    monkeypatch.setattr(device_support, "has_reduction_options", lambda: False)
    device_support.check_torch(zeroamp.policy_from_config(config()))
    with pytest.raises(zeroamp.ConfigError, match=f"{key} needs torch 2.13.* {torch.__version__.split('+')[0]}"):
        device_support.check_torch(zeroamp.policy_from_config(config(zeroamp=options)))
