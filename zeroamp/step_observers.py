"""Who is told of every optimizer step of this process: a profiler that was there before the `TrainStep` it follows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

StepObserver = Callable[[nn.Module], None]
"""Called with the wrapped root, on every rank, after a step was taken or skipped and its gradients are gone."""

_observers: list[StepObserver] = []


@contextmanager
def observe_steps(observer: StepObserver) -> Iterator[None]:
    """Call `observer` after every optimizer step inside the context."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def tell_observers(root: nn.Module) -> None:
    """Say that the model of `root` has made a step. What an observer raises, the step raises."""
    for observer in tuple(_observers):
        observer(root)
