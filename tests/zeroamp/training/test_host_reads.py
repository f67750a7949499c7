"""`TrainStep.step()` reads nothing from the device before the optimizer's first op, and one copy after that op."""

import threading
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped

NAME = "llama_tied"
BF16 = {"dtype": None, "bf16": {"enabled": True}}
MODES = {
    "bf16": config(3, clip=1.0, **BF16),
    "autocast": config(2, clip=1.0),
    "fp16": config(3, dtype="float16", clip=1.0, fp16={"initial_scale_power": 4}),
    "fp16 without clipping": config(3, dtype="float16", fp16={"initial_scale_power": 4}),
    "skipped steps": config(3, **BF16, zeroamp={"skip_nonfinite_steps": True}),
    "background save": config(3, clip=1.0),
    "preemption": config(3, clip=1.0),
    "run report": config(3, clip=1.0),
}


class Reads(TorchDispatchMode):
    """Counts reads of tensors' values by the host: as a number, as a list or as an array."""

    def __init__(self):
        super().__init__()
        self.before, self.after = [], []
        self._is_updating = False
        self._thread = threading.get_ident()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note("one number")
        return func(*args, **(kwargs or {}))

    def note(self, what):
        if threading.get_ident() == self._thread:  # a save in the background reads in another thread
            (self.after if self._is_updating else self.before).append(what)

    @contextmanager
    def counting(self, optimizer_class):
        real = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy")}

        def reading(name):
            def read(tensor, *args, **kwargs):
                self.note(name)
                return real[name](tensor, *args, **kwargs)

            return read

        step = optimizer_class.step

        def begin(*args, **kwargs):
            self._is_updating = True
            return step(*args, **kwargs)

        patches = [mock.patch.object(torch.Tensor, name, reading(name)) for name in real]
        with patches[0], patches[1], mock.patch.object(optimizer_class, "step", begin), self:
            yield


def _instrument(mode, folder, model, train):
    """Return a context manager for all steps, and the function to call before the step that is counted."""
    if mode == "preemption":
        return zeroamp.Preemption(model), lambda: None
    if mode == "run report":
        return zeroamp.RunReport(train, folder / "run.jsonl"), lambda: None
    if mode == "background save":
        return nullcontext(), lambda: zeroamp.save_checkpoint(folder / "step", model, train, async_=True)
    return nullcontext(), lambda: None


def _count(mode, folder, fused):
    model = wrapped(NAME, MODES[mode])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    train = zeroamp.TrainStep(model, optimizer)
    context, prepare = _instrument(mode, folder, model, train)
    reads = Reads()
    with context:
        for index in range(3):
            train.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())))
            if index == 2:
                with reads.counting(torch.optim.AdamW):
                    report = train.step()
            else:
                train.step()
                if index == 1:
                    prepare()
    train.saving.wait()
    assert not report.skipped
    return reads.before, reads.after


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_read_before_the_update_and_one_copy_after_it(ranks2, mode, tmp_path):
    for before, after in ranks2.run(_count, mode, tmp_path, True):
        assert before == []
        assert len(after) <= 1, after


@pytest.mark.parametrize("mode", ["fp16", "skipped steps"])
def test_before_the_update_of_another_optimizer_one_copy_is_read(ranks2, mode, tmp_path):
    for before, _ in ranks2.run(_count, mode, tmp_path, False):
        assert before == ["tolist"]


def _on_a_device(clip):
    """A default step where sums are read one step late, as on a device."""
    model = wrapped(NAME, config(3, clip=clip))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    train.callbacks.agreement.is_late = True
    counts = []
    for index in range(3):
        reads = Reads()
        train.backward(loss_of(model, batch(NAME, index)))
        with reads.counting(torch.optim.AdamW):
            report = train.step()
            during = len(reads.after)
            _ = report.loss, report.grad_norm
        counts.append((reads.before, during, len(reads.after) - during))
    return counts


def test_on_a_device_a_default_step_reads_nothing_but_its_report_when_the_caller_does(ranks2):
    for counts in ranks2.run(_on_a_device, 1.0):
        assert counts == [([], 0, 1)] * 3
