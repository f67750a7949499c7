"""`train.no_sync()`: backwards inside are not the last of their optimizer step, the first one outside is."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, full_parameters, same_bits, wrapped
from tests.selection import slow_but

NAME = "llama_tied"
COUNTS = (3, 1, 2)


def _trained(how, stage):
    model = wrapped(NAME, config(stage, clip=0.5))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses, index = [], dist.get_rank()
    for count in COUNTS:
        for micro in range(count):
            is_last = micro + 1 == count
            loss = loss_of(model, batch(NAME, index))
            if how == "is_last":
                train.backward(loss / count, is_last=is_last, divide=False)
            elif is_last:
                train.backward(loss / count, divide=False)
            else:
                with train.no_sync():
                    train.backward(loss / count, divide=False)
            index += 2
        report = train.step()
        losses.append((report.loss, report.grad_norm))
    return losses, full_parameters(model)


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 1, 3))
def test_no_sync_gives_the_bits_of_is_last(ranks2, stage):
    for one, other in zip(*(ranks2.run(_trained, how, stage) for how in ("is_last", "no_sync")), strict=True):
        assert one[0] == other[0]
        assert same_bits(one[1], other[1]) == []


def _misused(what):
    model = wrapped(NAME, config(3, accumulation=2))
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def backward(**flags):
        train.backward(loss_of(model, batch(NAME, dist.get_rank())), **flags)

    if what == "counted before":
        backward()
        train.step()
    with train.no_sync():
        backward(is_last=True if what == "last inside" else None)
        if what == "step inside":
            train.step()
    if what == "step without a last":
        train.step()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("counted before", "is_last for some"),
        ("last inside", r"is_last=True.* no_sync\(\)"),
        ("step inside", "before the last micro-batch"),
        ("step without a last", "before the last micro-batch"),
    ],
)
def test_what_contradicts_no_sync_is_refused(ranks2, what, text):
    with pytest.raises(AssertionError, match=f"StepError: .*{text}"):
        ranks2.run(_misused, what)
