"""`TrainStep.step()` reads nothing from the device, or one number in float16 and if steps may be skipped."""

import threading
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import SmallTraining, config, wrapped
from zeroamp.training.step import driver_of

BF16 = {"dtype": None, "bf16": {"enabled": True}}
MODES = {
    "bf16": config(3, clip=1.0, **BF16),
    "autocast": config(2, clip=1.0),
    "fp16": config(3, dtype="float16", clip=1.0, fp16={"initial_scale_power": 4}),
    "fp16 without clipping": config(3, dtype="float16", fp16={"initial_scale_power": 4}),
    "skipped steps": config(3, **BF16, zeroamp={"skip_nonfinite_steps": True}),
    "background save": config(3, clip=1.0),
    "run report": config(3, clip=1.0),
}
READING = ("fp16", "fp16 without clipping", "skipped steps")


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
    if mode == "run report":
        return zeroamp.RunReport(train, folder / "run.jsonl"), lambda: None
    if mode == "background save":
        return nullcontext(), lambda: zeroamp.save_checkpoint(folder / "step", model, train, async_=True)
    return nullcontext(), lambda: None


def _count(mode, folder, fused):
    training = SmallTraining(MODES[mode], lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=fused))
    train = training.train
    driver_of(train).all_reduce.is_late = True  # as on a device
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
    return before, after, len(reads.before) + len(reads.after) - len(before) - len(after)


COPY_OF_THE_STEP_BEFORE = ["tolist"]


@pytest.mark.parametrize(
    ("mode", "fused"),
    [*((mode, True) for mode in MODES), ("fp16", False), ("skipped steps", False)],
)
def test_only_the_sums_of_the_step_before_are_read_or_the_norm_where_a_step_may_be_skipped(
    ranks2, mode, fused, tmp_path
):
    for before, after, by_report in ranks2.run(_count, mode, tmp_path, fused):
        assert before == [*COPY_OF_THE_STEP_BEFORE, *["one number"] * (mode in READING)]
        if mode not in READING:
            assert after == (["tolist"] if mode == "run report" else [])  # the record of the step before
            assert by_report == 2, "a report reads its numbers when the caller does"


class _Collectives(TorchDispatchMode):
    """Lists the collectives that reach a process group."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def _collectives_of_steps(options, is_plain):
    """The collectives of the second optimizer step at each stage, after its backward."""
    found = []
    for stage in range(4):
        model = wrapped("llama_tied", config(stage, **options))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train = None if is_plain else zeroamp.TrainStep(model, optimizer)
        for index in range(2):
            loss = loss_of(model, batch("llama_tied", 2 * index + dist.get_rank()))
            loss.backward() if train is None else train.backward(loss)
            with _Collectives() as collectives:
                optimizer.step() if train is None else train.step()
            model.zero_grad()
        found.append(collectives.names)
    return found


FP16 = {"dtype": "float16", "fp16": {"initial_scale_power": 4}}


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [({}, False), (BF16, False), (FP16, False), ({}, True)],
    ids=["autocast", "bf16", "fp16", "plain loop"],
)
def test_an_optimizer_step_has_one_collective(ranks2, options, is_plain):
    assert ranks2.run(_collectives_of_steps, options, is_plain) == [[["c10d::allreduce_"]] * 4] * 2
