"""The pages of `--html`: whole in one file, with the numbers of `--json`, and drawn by a browser without an error."""

import json
import re
from html.parser import HTMLParser

import pytest

from tests.processes.chromium import CHROMIUM, Browser
from tests.processes.cli import NET, run
from tests.processes.training import config
from tests.selection import slow_but
from tests.zeroamp.reporting.records import record, write_run

pytest.importorskip("plotly")

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"


WARNING = {"kind": "warning", "name": "slow", "text": HOSTILE}


def write_hostile_run(path):
    write_run(path, [record(step, loss=2.0 / step) for step in range(1, 6)])
    path.write_text(f"{path.read_text()}{json.dumps(WARNING)}\n")
    return path


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


@pytest.mark.parametrize(
    ("name", "words"), [("page.png", "must end in .html"), ("zero.json/page.html", "cannot be written")]
)
def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path, name, words):
    (tmp_path / "zero.json").write_text("{}")
    (tmp_path / "giant.py").write_text("def build(): raise SystemExit('built')")
    model = ("--model", f"{tmp_path / 'giant.py'}:build")
    for command in (
        ("explain", tmp_path / "zero.json", *model),
        ("plan", tmp_path / "zero.json", *model, "--world-size", 2),
    ):
        code, out, err = run(*command, "--html", tmp_path / name)
        assert (code, out) == (1, "")
        assert words in err
        assert "built" not in err


def test_without_plotly_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    path = write_run(tmp_path / "one.jsonl", [record(1)])
    code, out, err = run("report", path, "--html", tmp_path / "page.html")
    assert (code, out) == (1, "")
    assert err == "Error: --html needs the module 'plotly.offline': pip install 'zeroamp[html]'.\n"


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _forget(request):
    if "browser" in request.fixturenames:
        opened = request.getfixturevalue("browser")
        opened.errors.clear()
        opened.requests.clear()


def cells(browser, index, selector="tbody tr"):
    """Return the texts of the rows of a table of the page, by its number."""
    rows = f"[...document.querySelectorAll('table')[{index}].querySelectorAll('{selector}')]"
    return browser.evaluate(f"{rows}.map((row) => [...row.children].map((cell) => cell.textContent))")


@needs_chromium
@pytest.mark.parametrize("width", slow_but([1280, 390], 1280))
@pytest.mark.parametrize("command", ["explain", "plan", "report"])
def test_a_page_is_drawn_without_an_error_a_request_or_a_scroll_bar(pages, browser, command, width):
    path = pages[command][0]
    browser.open(path, width=width)
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.querySelectorAll('.chart .main-svg').length") > 0


def unfold(browser):
    browser.evaluate("document.querySelector('input[type=checkbox]').click()")


@needs_chromium
def test_equal_layers_are_one_row_and_parameters_that_are_not_bf16_can_be_shown_alone(pages, browser):
    path, _ = pages["explain"]
    browser.open(path)
    rows = cells(browser, 1)
    assert [row[:2] for row in rows] == [
        ["blocks.0…2.0.weight", "3"],
        ["blocks.0…2.0.bias", "3"],
        ["blocks.0…2.1.weight", "3"],
        ["blocks.0…2.1.bias", "3"],
    ]
    browser.evaluate("document.querySelectorAll('input[type=checkbox]')[1].click()")
    shown = [row[0] for row in cells(browser, 1)]
    assert shown == ["blocks.0…2.1.weight", "blocks.0…2.1.bias"]
    assert [row[10] for row in cells(browser, 1)] == ["not safe: owned by LayerNorm (blocks.0…2.1)"] * 2
    unfold(browser)
    assert len(cells(browser, 1)) == 12


@needs_chromium
def test_pages_follow_the_systems_dark_colours(pages, browser):
    colours = []
    for dark in (False, True):
        browser.open(pages["plan"][0], dark=dark)
        script = (
            "[getComputedStyle(document.body).backgroundColor, document.querySelector('.chart').layout.paper_bgcolor]"
        )
        colours.append(browser.evaluate(script))
    assert colours == [["rgb(255, 255, 255)", "#ffffff"], ["rgb(13, 17, 23)", "#0d1117"]]


@needs_chromium
def test_a_parameter_is_found_filtered_and_sorted(pages, browser):
    path, printed = pages["explain"]
    browser.open(path)
    unfold(browser)
    assert len(cells(browser, 1)) == len(printed["parameters"]) == 12

    def search(words):
        browser.evaluate(
            f"(() => {{ const field = document.querySelector('input[type=search]'); field.value = {words!r};"
            "field.dispatchEvent(new Event('input')); })()"
        )
        return [row[0] for row in cells(browser, 1)]

    assert search("WEIGHT blocks.1") == ["blocks.1.0.weight", "blocks.1.1.weight"]
    assert browser.evaluate("document.querySelector('.count').textContent") == "2 of 12"
    assert search("nothing") == []
    assert len(search("")) == 12
    browser.evaluate(
        "(() => { const choice = document.querySelector('select[name=param]'); choice.value = 'bf16';"
        "choice.dispatchEvent(new Event('change')); })()"
    )
    low = [row["parameter"] for row in printed["parameters"] if row["param"] == "bf16"]
    assert [row[0] for row in cells(browser, 1)] == low
    browser.evaluate("document.querySelectorAll('table')[1].querySelectorAll('th button')[1].click()")  # elements
    numbers = [int(row[1].replace(",", "")) for row in cells(browser, 1)]
    assert numbers == sorted(numbers, reverse=True)
    assert set(numbers) == {8, 64}


@needs_chromium
def test_a_search_is_in_the_address(pages, browser):
    browser.open(f"{pages['explain'][0].as_uri()}#q=blocks.2%20bias")
    unfold(browser)
    assert [row[0] for row in cells(browser, 1)] == ["blocks.2.0.bias", "blocks.2.1.bias"]


@needs_chromium
def test_the_units_are_boxes_in_the_colours_of_the_chosen_dtype(pages, browser):
    path, printed = pages["explain"]
    browser.open(path)
    drawn = "document.querySelector('#units').data[0]"
    assert browser.evaluate(f"{drawn}.values.length") == 1 + len({row["unit"] for row in printed["parameters"]}) + 12
    assert browser.evaluate(f"{drawn}.values[0]") == sum(row["elements"] for row in printed["parameters"])
    before = browser.evaluate(f"{drawn}.marker.colors")
    browser.evaluate(
        "(() => { const choice = document.querySelector('select'); choice.value = 'optimizer';"
        "choice.dispatchEvent(new Event('change')); })()"
    )
    after = browser.evaluate(f"{drawn}.marker.colors")
    assert len(set(before[1:])) == 2
    assert len(set(after[1:])) == 1  # all fp32


@needs_chromium
def test_the_plan_has_a_panel_and_a_row_per_stage(pages, browser):
    path, printed = pages["plan"]
    browser.open(path)
    titles = browser.evaluate("[...document.querySelectorAll('.chart')].map((chart) => chart.layout.title.text)")
    assert titles[:4] == [f"Stage {stage}" for stage in range(4)]
    panels = "[...document.querySelectorAll('.chart')].slice(0, 4)"
    tops = browser.evaluate(f"{panels}.map((chart) => chart.layout.yaxis.range[1])")
    assert len(set(tops)) == 1  # one axis
    assert browser.evaluate(f"{panels}.every((chart) => chart.data.every((kind) => !kind.showlegend))")
    assert "activations" in browser.evaluate("document.querySelector('.legend').textContent")
    first = "document.querySelector('.chart')"
    assert browser.evaluate(f"{first}.layout.annotations.map((each) => each.text)")[:3] == ["F", "B", "opt"]
    assert browser.evaluate(f"{first}.layout.xaxis.range") == [0, browser.evaluate(f"{first}.data[0].x.length") - 1]
    rows = cells(browser, 0)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [int(row[4].replace(",", "")) for row in rows] == [stage["largest_batch"] for stage in printed["stages"]]
    stages = printed["stages"]
    digits = 5e-3  # half a unit of the third significant digit
    sent = [sum(part["bytes"] for part in stage["traffic"]) for stage in stages]
    for column, name, values in ((2, "peak", [stage["peak_bytes"] for stage in stages]), (5, "communicated", sent)):
        head = browser.evaluate(f"document.querySelectorAll('table')[0].querySelectorAll('th')[{column}].textContent")
        assert head.startswith(name)
        size = 1024 ** ["bytes", "KiB", "MiB", "GiB"].index(head.rpartition(" ")[2])
        assert [float(row[column].replace(",", "")) * size for row in rows] == pytest.approx(values, rel=digits)
    bars = browser.evaluate("[...document.querySelectorAll('.chart')][5].data.map((bar) => bar.y)")
    assert [1024 * sum(parts) for parts in zip(*bars, strict=True)] == pytest.approx(sent, rel=1e-12)  # additions
    colours = (
        "[...document.querySelectorAll('table')[0].querySelectorAll('tbody tr')].map((r) => r.children[3].style.color)"
    )
    assert browser.evaluate(colours) == ["rgb(26, 127, 55)"] * 4


@needs_chromium
def test_the_peak_and_a_gpus_memory_near_it_are_marked_and_what_would_fit_is_a_table(pages, browser, tmp_path):
    text = pages["plan"][0].read_text()
    timelines = json.loads(_Parser(text).data)["timelines"]
    limit = int(1.1 * max(timelines[0]["total"]))
    small = tmp_path / "small.html"
    remedy = {"stage": 3, "num_ranks": 32, "checkpointing": True, "offload": False}
    remedy |= {"peak_bytes": 4 * 2**20, "host_bytes": 0}
    text = text.replace('"remedies":null', f'"remedies":{json.dumps([remedy])}').replace('"fits":true', '"fits":false')
    small.write_text(re.sub(r'"memory_bytes":\d+', f'"memory_bytes":{limit}', text))
    browser.open(small)
    layout = "document.querySelector('.chart').layout"
    lines = browser.evaluate(
        f"{layout}.shapes.filter((line) => line.line.dash === 'dash').map((line) => [line.y0, line.y1])"
    )
    assert lines == [[limit / 2**10] * 2]
    peak = browser.evaluate(f"{layout}.annotations.at(-1)")
    assert (peak["x"], peak["y"] * 2**10) == (
        timelines[0]["total"].index(max(timelines[0]["total"])),
        max(timelines[0]["total"]),
    )
    assert cells(browser, 1) == [["32", "yes", "no", "4.00", "0"]]
    first = "document.querySelectorAll('table')[0].querySelector('tbody tr').children[3]"
    assert browser.evaluate(f"{first}.style.color") == "rgb(207, 34, 46)"


@needs_chromium
def test_runs_are_lines_of_their_records_and_zoom_together(pages, browser):
    path, printed = pages["report"]
    browser.open(path)
    charts = "[...document.querySelectorAll('.chart')]"
    losses = browser.evaluate(f"{charts}[0].data.map((line) => line.y)")
    assert losses == [[record["loss"] for record in run["records"]] for run in printed["runs"]]
    browser.evaluate(f"void Plotly.relayout({charts}[0], {{'xaxis.range[0]': 2, 'xaxis.range[1]': 3}})")
    browser.wait_for(f"{charts}.slice(0, -1).every((chart) => chart.layout.xaxis.range[1] === 3)")
    assert browser.evaluate("[number('inf'), -number('-inf'), 1 / number('nan')].map(String)") == [
        "Infinity",
        "Infinity",
        "NaN",
    ]
    text = "document.querySelector('#page').textContent"
    assert browser.evaluate(f"{text}.indexOf('Warnings') < {text}.indexOf('Side by side')")
    browser.evaluate("(() => { smoothing.value = 0.9; smoothing.dispatchEvent(new Event('input')); log.click(); })()")
    smooth = browser.evaluate(f"{charts}[0].data[0].y")
    assert smooth[0] == losses[0][0]
    assert smooth[1] == pytest.approx((0.9 * losses[0][0] + losses[0][1]) / 1.9)
    assert browser.evaluate(f"{charts}[0].layout.yaxis.type") == "log"
    drawn = browser.evaluate("traces({ runs: [{ name: '<b>one</b>', records: [] }] }, () => 0)")
    assert drawn[0]["name"] == "&lt;b>one&lt;/b>"  # plotly shows it as <b>one</b>
    assert browser.evaluate("document.title") == "one, two"
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert HOSTILE in browser.evaluate("document.querySelector('.warning').textContent")


@needs_chromium
def test_runs_show_the_keys_in_which_their_configs_differ(pages, browser):
    browser.open(pages["report"][0])
    assert "None: configs" in browser.evaluate("document.querySelector('#page').textContent")
    header = [{"config": {"a": {"b": value, "c": 1}}, "world_size": 2} for value in (3, 2)]
    data = {"runs": [{"name": str(each), "headers": [each]} for each in header]}
    found = browser.evaluate(f"differences({json.dumps(data)})")
    assert found == [{"key": "config.a.b", "run 0": "3", "run 1": "2"}]
