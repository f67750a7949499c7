"""`TrainStep.step()` reads nothing from the device, or one number in float16 and if steps may be skipped."""

import threading
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zeroamp
from tests.processes.training import SmallTraining, config
from zeroamp.training.step import step_of

BF16 = {"dtype": None, "bf16": {"enabled": True}}
MODES = {
    "stage 0": config(0),
    "stage 1, bf16": config(1, clip=1.0, **BF16),
    "stage 2, autocast": config(2, clip=1.0),
    "background save": config(3, clip=1.0),
    "run report": config(3, clip=1.0),
    "fp16": config(3, dtype="float16", clip=1.0, fp16={"initial_scale_power": 4}),
    "fp16 without clipping": config(3, dtype="float16", fp16={"initial_scale_power": 4}),
    "skipped steps": config(3, **BF16, zeroamp={"skip_nonfinite_steps": True}),
}
READING = ("fp16", "fp16 without clipping", "skipped steps")


class Reads(TorchDispatchMode):
    """Counts reads of tensors' values by the host, as a number, as a list or as an array; and lists collectives."""

    def __init__(self):
        super().__init__()
        self.before, self.after, self.collectives = [], [], []
        self._is_updating = False
        self._thread = threading.get_ident()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.note("one number")
        if func.namespace == "c10d":
            self.collectives.append(func.name().partition(".")[0])
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
    if mode == "run report":
        return zeroamp.RunReport(train, folder / "run.jsonl"), lambda: None
    if mode == "background save":
        return nullcontext(), lambda: zeroamp.save_checkpoint(folder / "step", model, train, async_=True)
    return nullcontext(), lambda: None


def _count(mode, folder, fused):
    # A tensor may be on a device: only the run's report reads it.
    lr = torch.tensor(1e-3) if fused and mode != "run report" else 1e-3
    training = SmallTraining(MODES[mode], lambda parameters: torch.optim.AdamW(parameters, lr=lr, fused=fused))
    train = training.train
    step_of(train).all_reduce.is_late = True  # as on a device
    context, prepare = _instrument(mode, folder, training.model, train)
    reads = Reads()
    with context:
        training.step(0)
        training.step(1)
        prepare()
        training.backward(2)
        with reads.counting(torch.optim.AdamW):
            report = train.step()
        before, after = list(reads.before), list(reads.after)
        with reads.counting(torch.optim.AdamW):
            _ = report.loss, report.grad_norm
    zeroamp.wait_for_save(training.model)
    assert not report.skipped
    assert reads.collectives == ["c10d::allreduce_"]
    return before, after, len(reads.before) + len(reads.after) - len(before) - len(after)


COPY_OF_THE_STEP_BEFORE = ["tolist"]


@pytest.mark.parametrize(
    ("mode", "fused"),
    [*((mode, True) for mode in MODES), ("fp16", False), ("skipped steps", False)],
)
def test_host_reads_and_collectives_of_a_step(ranks2, mode, fused, tmp_path):
    """One collective and no read but of the sums of the step before and of the norm where a step may be skipped."""
    for before, after, by_report in ranks2.run(_count, mode, tmp_path, fused):
        assert before == [*COPY_OF_THE_STEP_BEFORE, *["one number"] * (mode in READING)]
        if mode not in READING:
            assert after == (["tolist"] if mode == "run report" else [])  # the record of the step before
            assert by_report == 2, "a report reads its numbers when the caller does"
