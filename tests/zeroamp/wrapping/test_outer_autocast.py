"""An autocast of the caller around several optimizer steps has the bits of an autocast around each forward."""

from contextlib import nullcontext

import pytest
import torch

from tests.models.small import batch, build, loss_of
from tests.processes.training import config, wrapped
from tests.selection import slow_but

NAME = "llama_tied"  # its head is an fp32 leaf that autocast casts
NUM_STEPS = 3
OUTER = {
    "none": nullcontext,
    "same": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "disabled": lambda: torch.autocast("cpu", enabled=False),
}


def _losses(model, outer, *, evaluates=False, each=nullcontext):
    """Return the losses of some steps. The steps run inside `outer`, and each forward inside `each`."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    with OUTER[outer]():
        for index in range(NUM_STEPS):
            if evaluates:
                with torch.no_grad(), each():
                    loss_of(model, batch(NAME, 9))
            with each():
                loss = loss_of(model, batch(NAME, index))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _of_wrapped(cfg, outer, evaluates):
    return _losses(wrapped(NAME, cfg), outer, evaluates=evaluates)


def _of_plain(outer, each=nullcontext):
    return _losses(build(NAME), outer, each=each)


ALLOWED = {"dtype": None, "zeroamp": {"external_autocast": "allow"}}


@pytest.mark.parametrize("evaluates", slow_but([False, True], True))
@pytest.mark.parametrize(
    ("outer", "options"), [("same", {}), ("disabled", {}), ("same", ALLOWED)], ids=["same", "disabled", "allowed"]
)
def test_weights_are_cast_again_after_each_update(ranks2, outer, options, evaluates):
    # All ranks get the same batches, so that one process is the oracle.
    for rank in ranks2.run(_of_wrapped, config(3, comm="fp32", **options), outer, evaluates):
        assert rank == _of_plain("none", OUTER["same"])


def test_plain_torch_reads_old_casts_there():
    assert _of_plain("same") != _of_plain("none", OUTER["same"])
    assert _of_plain("same")[0] == _of_plain("none", OUTER["same"])[0]
