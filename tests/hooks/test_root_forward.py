"""What runs around the root's forward: its order, and that all of it is left whatever raises."""

from contextlib import contextmanager

import pytest
from torch import nn

from zeroamp.hooks.root_forward import PLACES, RootForward
from zeroamp.hooks.unit_hooks import UnitHooks


def attach(forward, root):
    hooks = UnitHooks()
    forward.add_hooks(root, hooks)
    hooks.register()


class Calls(nn.Module):
    """A root that logs its forward, has a method that calls it, and may raise."""

    def __init__(self, log, *, raises_at=None):
        super().__init__()
        self.log, self.raises_at, self.error = log, raises_at, ValueError

    def forward(self, number=0):
        if number == self.raises_at:
            raise self.error("in the forward")
        self.log.append("forward")
        return number

    def generate(self, last):
        for number in range(last):
            self(number)
        return self(last)


def _attached(forward, root):
    attach(forward, root)
    forward.register_method(root, "generate", pre_forwards=[], groups=[])
    return root


def _around(log, name):
    @contextmanager
    def context():
        log.append(f"enter {name}")
        try:
            yield
        finally:
            log.append(f"leave {name}")

    return lambda call: context() if call.is_outermost else None


def _all_places(log):
    forward = RootForward()
    for place in reversed(PLACES):  # the order of registration is not the order of running
        forward.add(place, _around(log, place))
    return forward


ENTERS, LEAVES = [f"enter {place}" for place in PLACES], [f"leave {place}" for place in reversed(PLACES)]


def test_the_order_is_that_of_the_table_and_not_of_the_registration():
    log = []
    root = _attached(_all_places(log), Calls(log))
    assert root() == 0
    assert log == [*ENTERS, "forward", *LEAVES]
    log.clear()
    assert root.generate(2) == 2
    assert log == [*ENTERS, *["forward"] * 3, *LEAVES]


@pytest.mark.parametrize("is_method", [False, True])
def test_everything_is_left_when_the_forward_raises_at_any_depth(is_method):
    log = []
    forward = _all_places(log)
    root = _attached(forward, Calls(log, raises_at=0))
    for _ in range(2):
        log.clear()
        with pytest.raises(ValueError, match="in the forward"):
            root.generate(1) if is_method else root()
        assert log == [*ENTERS, *LEAVES]
        assert forward.depth == 0


def test_a_forward_after_a_keyboard_interrupt_is_outermost_again():
    log = []
    forward = _all_places(log)
    root = Calls(log)
    attach(forward, root)
    root.raises_at, root.error = 0, KeyboardInterrupt  # torch calls no hook where it is raised
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            root()
    root.raises_at = None
    log.clear()
    root()
    assert log == [*LEAVES, *ENTERS, "forward", *LEAVES], "the interrupted one is left first"
    assert forward.depth == 0
