"""What the config asks a `TrainStep` to write or log about itself: tensorboard, csv_monitor, wandb, the breakdown."""

import logging
import weakref
from typing import TYPE_CHECKING

from zeroamp.planning.mesh import is_first_rank
from zeroamp.policies.policy import Policy
from zeroamp.reporting.record import StepRecord
from zeroamp.reporting.recorder import Recorder, Sink, recorder_of
from zeroamp.reporting.writers import CsvWriter, TensorBoardWriter, WandbWriter, Writers
from zeroamp.wrapping.state import signals_of, wrap_state

if TYPE_CHECKING:
    from zeroamp.training.step import TrainStep

logger = logging.getLogger("zeroamp")

STEPS_PER_BREAKDOWN = 10
"""Where the config has no `steps_per_print`."""


def attach_monitors(train: "TrainStep") -> None:
    """Attach what the config asks for; nothing, where it asks for nothing. All ranks call it.

    Raises:
        ConfigError: on all ranks, a monitor's package is missing, or its file cannot be written.
    """
    state = wrap_state(train.model)
    policy = state.plan.policy
    if not any((policy.tensorboard, policy.csv_monitor, policy.wandb, policy.wall_clock_breakdown)):
        return
    writers = Writers()
    signals_of(state).on_first(lambda: _open(writers, policy))
    if not is_first_rank(state.mesh):
        return
    sinks: list[Sink] = [writers.step]
    if policy.wall_clock_breakdown:
        sinks.append(breakdown(policy.steps_per_print or STEPS_PER_BREAKDOWN))
    recorder = recorder_of(state, train.callbacks)
    for sink in sinks:
        recorder.add(sink)
    # With the TrainStep, and at the end of the process at the latest: the last record may not be known before.
    weakref.finalize(train, _finish, recorder, sinks, writers)


def _open(writers: Writers, policy: Policy) -> None:
    if policy.csv_monitor is not None:
        writers.add(CsvWriter(policy.csv_monitor))
    if policy.tensorboard is not None:
        writers.add(TensorBoardWriter(policy.tensorboard))
    if policy.wandb is not None:
        writers.add(WandbWriter(policy.wandb, policy.to_config()))


def _finish(recorder: Recorder, sinks: list[Sink], writers: Writers) -> None:
    for sink in sinks:
        recorder.remove(sink)
    writers.close()


def breakdown(every: int) -> Sink:
    """Return a sink that logs where the time of every so-many-th step went.

    Of steps taken: one that is skipped has the number of the one before.
    """

    def log(record: StepRecord) -> None:
        if not record.skipped and record.step % every == 0:
            parts = ("forward", "backward", "exposed_communication", "optimizer", "other")
            milliseconds = {part: getattr(record, f"{part}_s") * 1e3 for part in parts}
            text = ", ".join(f"{part.replace('_', ' ')} {value:.1f}" for part, value in milliseconds.items())
            logger.info("step %d: %.1f ms: %s", record.step, record.step_s * 1e3, text)

    return log
