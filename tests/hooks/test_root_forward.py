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


def _around(log, name, raises=None):
    @contextmanager
    def context():
        log.append(f"enter {name}")
        if raises == "entering":
            raise ValueError(f"entering {name}")
        try:
            yield
        finally:
            log.append(f"leave {name}")

    return lambda call: context() if call.is_outermost else None


def _all_places(log, **raises):
    forward = RootForward()
    for place in reversed(PLACES):  # the order of registration is not the order of running
        forward.add(place, _around(log, place, raises.get(place.replace(" ", "_"))))
    return forward


def _expected(*places):
    return [f"enter {place}" for place in places], [f"leave {place}" for place in reversed(places)]


def test_the_order_is_that_of_the_table_and_not_of_the_registration():
    log = []
    root = _attached(_all_places(log), Calls(log))
    enters, leaves = _expected(*PLACES)
    assert root() == 0
    assert log == [*enters, "forward", *leaves]
    log.clear()
    assert root.generate(2) == 2
    assert log == [*enters, *["forward"] * 3, *leaves]


@pytest.mark.parametrize("is_method", [False, True])
def test_everything_is_left_when_the_forward_raises_at_any_depth(is_method):
    log = []
    forward = _all_places(log)
    root = _attached(forward, Calls(log, raises_at=0))
    for _ in range(2):
        log.clear()
        with pytest.raises(ValueError, match="in the forward"):
            root.generate(1) if is_method else root()
        enters, leaves = _expected(*PLACES)
        assert log == [*enters, *leaves]
        assert forward.depth == 0


def test_what_was_entered_is_left_when_a_later_one_refuses():
    log = []
    root = Calls(log)
    forward = _all_places(log, autocast="entering")
    attach(forward, root)
    with pytest.raises(ValueError, match="entering autocast"):
        root()
    enters, leaves = _expected("report", "outer autocast", "random state")
    assert log == [*enters, "enter autocast", *leaves]
    assert forward.depth == 0


def test_a_context_sees_the_exception_of_the_forward():
    """A context sees the exception of the forward and not one that was being handled before."""
    seen = []

    @contextmanager
    def context():
        try:
            yield
        except BaseException as error:
            seen.append(str(error))
            raise

    forward = RootForward()
    forward.add("random state", lambda _call: context())
    fine, raising = Calls([]), Calls([], raises_at=0)
    attach(forward, fine)
    attach(forward, raising)
    try:
        raise KeyError("around")
    except KeyError:
        fine()
        with pytest.raises(ValueError, match="in the forward"):
            raising()
    assert seen == ["in the forward"]


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
    enters, leaves = _expected(*PLACES)
    assert log == [*leaves, *enters, "forward", *leaves], "the interrupted one is left first"
    assert forward.depth == 0


def test_a_method_that_was_interrupted_is_left_with_the_call_inside():
    log = []
    forward = _all_places(log)
    root = _attached(forward, Calls(log, raises_at=1))
    root.error = KeyboardInterrupt  # in the second call of the root, for which torch calls no hook
    with pytest.raises(KeyboardInterrupt):
        root.generate(1)
    assert forward.depth == 0


class _CallsItself(nn.Module):
    def forward(self, call_again):
        return self(call_again=False) if call_again else "inner"


def test_a_model_may_call_itself_in_its_forward():
    depths = []
    forward, root = RootForward(), _CallsItself()
    forward.add("report", lambda call: depths.append((call.is_outermost, forward.depth)))
    attach(forward, root)
    assert [root(call_again=True), root(call_again=False)] == ["inner", "inner"]
    assert depths == [(True, 1), (False, 2), (True, 1)]
    assert forward.depth == 0


def test_outputs_are_shown_unchanged_and_a_removed_context_is_not_entered():
    log, outputs = [], []
    root = Calls(log)
    forward = RootForward()
    around = _around(log, "report")
    forward.add("report", around)
    forward.on_output(outputs.append)
    attach(forward, root)
    forward.remove("report", around)
    assert root(1) == 1
    assert outputs == [1]
    assert log == ["forward"]
