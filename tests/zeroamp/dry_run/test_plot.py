"""The picture of a plan: its stretches are those of the step, in order."""

import importlib

import numpy as np
import pytest

import zeroamp
from tests.selection import slow_but
from tests.zeroamp.dry_run.plans import plan
from zeroamp.dry_run.plot import stretches
from zeroamp.dry_run.timeline import PHASES

ONE = ["forward", "backward"]


def planned(accumulation=1):
    return plan({"accumulation": accumulation}, stages=(3,))


@pytest.mark.parametrize(
    ("accumulation", "names"),
    [
        pytest.param(1, [""], marks=pytest.mark.slow),
        pytest.param(2, ["first micro-batch", "last micro-batch"], marks=pytest.mark.slow),
        (4, ["first micro-batch", "middle micro-batch", "last micro-batch"]),
    ],
)
def test_all_events_of_the_step_are_in_stretches_in_the_order_in_which_they_happen(accumulation, names):
    memory = planned(accumulation).stages[0].memory
    found = stretches(memory)
    assert [stretch.phase for stretch in found] == [*ONE * len(names), "optimizer"]
    assert [stretch.micro_batch for stretch in found[:-1:2]] == names
    assert {stretch.micro_batch for stretch in (*found[1::2], found[-1])} == {""}
    events = np.concatenate([stretch.events for stretch in found])
    assert np.array_equal(events, np.flatnonzero(memory.phases != PHASES.index("init")))
    assert np.array_equal(events, np.arange(events[0], len(memory.phases)))


def test_the_picture_names_every_micro_batch_and_draws_its_stretches_from_left_to_right(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    texts, text = [], Axes.text
    monkeypatch.setattr(
        Axes, "text", lambda axes, x, y, words, **more: texts.append((x, words)) or text(axes, x, y, words, **more)
    )
    run = planned(4)
    run.plot(tmp_path / "new" / "memory.png")
    assert (tmp_path / "new" / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert [words.split() for _, words in texts] == [
        *(words for name in ("first", "middle", "last") for words in ([name, "micro-batch", "forward"], ["backward"])),
        ["optimizer"],
    ]
    assert [x for x, _ in texts] == sorted({x for x, _ in texts})


@pytest.mark.parametrize("name", slow_but(["memory.foo", "memory", "file/memory.png"], "memory.foo"))
def test_a_picture_that_cannot_be_written_is_an_error_that_says_why(tmp_path, name):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(zeroamp.ConfigError, match=rf"plot.*{tmp_path / name}"):
        planned().plot(tmp_path / name)


def test_without_matplotlib_the_plot_says_what_to_install(tmp_path, monkeypatch):
    run = planned()

    def missing(name):
        raise ModuleNotFoundError(name="matplotlib")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(zeroamp.ConfigError, match=r"pip install 'zeroamp\[plot\]'"):
        run.plot(tmp_path / "memory.png")
