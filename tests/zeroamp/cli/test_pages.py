"""The pages of `--html`: whole in one file, with the numbers of `--json`."""

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import zeroamp
from tests.processes.cli import NET, run
from tests.processes.training import config
from tests.zeroamp.reporting.records import record, write_run

pytest.importorskip("plotly")

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"


def write_hostile_run(path):
    return write_run(path, [record(step, loss=2.0 / step) for step in range(1, 6)], device=HOSTILE)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Command -> the page that it wrote, and the object that it prints with --json."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "zero.json").write_text(json.dumps(config(3)))
    (folder / "net_of_pages.py").write_text(NET)
    net = f"{folder / 'net_of_pages.py'}:Net"
    runs = [write_hostile_run(folder / f"{name}.jsonl") for name in ("one", "two")]
    inputs = ("--inputs", net.replace("Net", "batch"))
    commands = {
        "explain": (folder / "zero.json", "--model", net, "--world-size", 16),
        "plan": (folder / "zero.json", "--model", net, *inputs, "--world-size", 16, "--seq", 4),
        "report": tuple(runs),
    }
    found = {}
    for command, arguments in commands.items():
        code, out, err = run(command, *arguments, "--json", "--html", folder / f"{command}.html")
        assert code == 0, err
        assert err.endswith(f"wrote {folder / command}.html\n")
        found[command] = folder / f"{command}.html", json.loads(out)
    return found


class _Parser(HTMLParser):
    """Collects what a page refers to, and the text of its data."""

    def __init__(self, text):
        super().__init__()
        self.references, self.data, self._is_data, self.scripts = [], "", False, 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.references += [given[name] for name in ("src", "href", "data", "action") if name in given]
        self._is_data = given.get("id") == "data"
        self.scripts += tag == "script"

    def handle_data(self, data):
        self.data += data if self._is_data else ""

    def handle_endtag(self, tag):
        self._is_data = False


@pytest.mark.parametrize("command", ["explain", "plan", "report"])
def test_a_page_is_whole_and_holds_the_numbers_of_json(pages, command):
    path, printed = pages[command]
    page = _Parser(path.read_text())
    assert (page.references, page.scripts) == ([], 3)
    assert "connect-src 'none'" in path.read_text()
    held = json.loads(page.data)
    assert (held["plan"] if command == "plan" else held) == printed


def test_the_memory_on_the_page_is_that_of_the_plan(pages):
    path, printed = pages["plan"]
    timelines = json.loads(_Parser(path.read_text()).data)["timelines"]
    assert [timeline["stage"] for timeline in timelines] == [0, 1, 2, 3]
    for timeline, stage in zip(timelines, printed["stages"], strict=True):
        steps = [name for name in stage["memory"] if name not in ("peak", "init")]
        assert max(timeline["total"]) == max(sum(stage["memory"][phase].values()) for phase in steps)
        assert [sum(kind["bytes"][at] for kind in timeline["kinds"]) for at in (0, -1)] == [
            timeline["total"][at] for at in (0, -1)
        ]


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "zero.json").write_text("{}")
    (tmp_path / "giant.py").write_text("def build(): raise SystemExit('built')")
    model = ("--model", f"{tmp_path / 'giant.py'}:build")
    for command in (
        ("explain", tmp_path / "zero.json", *model),
        ("plan", tmp_path / "zero.json", *model, "--world-size", 2),
    ):
        code, out, err = run(*command, "--html", tmp_path / "zero.json" / "page.html")
        assert (code, out) == (1, "")
        assert "cannot be written" in err
        assert "is a folder" in run(*command, "--html", tmp_path)[2]
        assert "built" not in err
        assert "no.such" in run(*command, "--html", tmp_path / "page.html", "--model", "no.such:model")[2]
        assert not (tmp_path / "page.html").exists()
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    assert run(*command, "--html", tmp_path / "link.html", "--model", "no.such:model")[0] == 1
    assert (tmp_path / "link.html").is_symlink()


def _luminance(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other):
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_every_text_has_a_contrast_of_4_5_in_both_themes():
    pages = Path(zeroamp.__path__[0], "reporting", "pages")
    light, dark = re.findall(r":root \{(.*?)\}", (pages / "page.css").read_text(), re.DOTALL)
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", theme)) for theme in (light, dark)]
    for theme in themes:
        assert theme.keys() == {"ink", "soft", "line", "grid", "back", "paper", "accent", "good", "yes", "no"}
        for text in ("ink", "soft", "accent", "yes", "no"):
            assert min(_contrast(theme[text], theme[below]) for below in ("paper", "back")) >= 4.5, text
    chips = re.findall(r"#\w{6}", re.search(r"const DTYPES = .*", (pages / "common.js").read_text())[0])
    assert len(chips) == 6
    assert min(_contrast(chip, "#ffffff") for chip in chips) >= 4.5


def test_a_page_ends_with_config_and_versions(pages):
    for command, (path, printed) in pages.items():
        text = path.read_text()
        footer = text[text.index("<footer>") : text.index("</footer>")]
        assert re.search(rf"Written on \d{{4}}-\d\d-\d\d .* by zeroamp {zeroamp.__version__}, with torch \d", footer)
        title = re.search("<title>(.*)</title>", text)[1]
        assert str(path.parent) not in title
        if command != "report":
            assert json.dumps(printed["config"], indent=2) in html.unescape(footer)
            assert title.endswith("net_of_pages.py:Net")


def test_without_plotly_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    path = write_run(tmp_path / "one.jsonl", [record(1)])
    code, out, err = run("report", path, "--html", tmp_path / "page.html")
    assert (code, out) == (1, "")
    assert err == "Error: --html needs the module 'plotly.offline': pip install 'zeroamp[html]'.\n"
