"""The progress line: a bar in a terminal, plain lines elsewhere."""

import io
import sys

import pytest

import zeroamp
from tests.zeroamp.reporting.records import record
from zeroamp.reporting.writers import ProgressLine


def shown(num_steps, records, file=None):
    file = file or io.StringIO()
    line = ProgressLine(num_steps, file)
    for each in records:
        line.step(each)
    line.close()
    return file.getvalue()


def test_elsewhere_it_is_about_twenty_plain_lines():
    text = shown(100, [record(step, tokens_per_s=1234.5) for step in range(1, 101)])
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"step {step}/100" for step in (1, *range(5, 101, 5))]
    assert lines[0] == "step 1/100: loss 2.0000, norm 1, 1,234 tokens/s, peak RSS 0.00 GiB"
    assert "\r" not in text
    assert "\x1b" not in text


def test_a_run_that_is_gone_on_with_shows_its_first_step_here():
    assert shown(100, [record(42), record(43)]).splitlines()[0].startswith("step 42/100")


def test_skipped_steps_have_no_lines_of_their_own():
    steps = [*[record(0, skipped=True)] * 5, record(1), record(2), *[record(2, skipped=True)] * 2, record(3)]
    lines = shown(40, steps).splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 0/40", "step 2/40"]
    assert [line.split(":")[0] for line in shown(3, [*steps, record(3, skipped=True)]).splitlines()] == [
        "step 0/3",
        "step 1/3",
        "step 2/3",
        "step 3/3",
    ]


def test_it_says_what_is_known():
    text = shown(1, [record(mfu=0.4, peak_active_gib=1.5, skipped=True, loss_scale=8.0)])
    assert text == "step 1/1: loss 2.0000, norm 1, skipped at scale 8, MFU 40.0%, peak 1.50 GiB on the device\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_it_is_one_bar():
    pytest.importorskip("tqdm")
    text = shown(3, [record(1), record(1, skipped=True), record(2), record(3)], Terminal())
    assert text.count("\n") == 1
    assert "3/3" in text
    assert "loss 2.0000" in text


def test_the_bar_of_a_run_that_is_gone_on_with_starts_where_it_does(monkeypatch):
    tqdm = pytest.importorskip("tqdm")
    made, make = [], tqdm.tqdm
    monkeypatch.setattr(tqdm, "tqdm", lambda *args, **options: made.append(make(*args, **options)) or made[-1])
    text = shown(100, [record(42), record(43)], Terminal())
    assert [(bar.initial, bar.n) for bar in made] == [(42, 43)]
    assert " 0/100" not in text


def test_a_terminal_without_tqdm_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(zeroamp.ConfigError, match=r"RunReport\(num_steps=\).* 'tqdm'.*zeroamp\[report\]"):
        ProgressLine(3, Terminal())
