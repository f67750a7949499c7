"""The documentation: pages are reached, what they name exists, and their Python runs or says that it is a fragment."""

import ast
import builtins
import importlib.util
import inspect
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

import zeroamp
from tests.processes.launch import ROOT
from tests.processes.other_device import model_on_another_device
from zeroamp.policies.schema.config import Config
from zeroamp.policies.schema.keys import iter_keys

PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")] + PAGES
BLOCK = re.compile(r"^```python(?P<title>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path):
    """Return (is a fragment, code) of the Python blocks of a page; those of one page share their names."""
    return [('title="fragment"' in found["title"], found["code"]) for found in BLOCK.finditer(path.read_text())]


def name(path):
    return path.name


def generator(file="generate"):
    spec = importlib.util.spec_from_file_location(f"docs_{file}", ROOT / "docs" / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once():
    names = re.findall(r"^ +- .*: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(names) == len(set(names))
    assert set(names) == {path.name for path in PAGES}


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_files_that_a_page_names_exist(path):
    named = re.findall(r"`((?:docs|tests|examples|benchmarks|zeroamp|hooks|policies)/[\w./-]*\w/?)`", path.read_text())
    missing = [each for each in named if not (ROOT / each).exists()]
    assert missing == []
    linked = re.findall(r"\]\((?!https?:)([\w./-]+)(?:#[\w-]+)?\)", path.read_text())
    assert [each for each in linked if not (path.parent / each).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_pages_link_each_other(path):
    """Write [Losses](losses.md): `docs/losses.md` in backticks is no link, neither on GitHub nor on the site."""
    assert re.findall(r"`docs/[\w-]+\.md`", path.read_text()) == []


def test_the_index_has_every_page():
    linked = re.findall(r"\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text())
    assert set(linked) == {path.name for path in PAGES} - {"index.md"}


WITH_FRAGMENTS = [path for path in TEXTS if any(is_fragment for is_fragment, _ in blocks(path))]


@pytest.mark.parametrize("path", WITH_FRAGMENTS, ids=name)
def test_fragments_are_python_and_their_public_names_and_arguments_exist(path):
    nodes = [node for is_fragment, code in blocks(path) if is_fragment for node in ast.walk(ast.parse(code))]
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "zeroamp":
            assert node.attr in zeroamp.__all__ or importlib.util.find_spec(f"zeroamp.{node.attr}"), node.attr
        if isinstance(node, ast.Call) and (function := _public(node.func)) is not None:
            parameters = inspect.signature(function).parameters
            takes_any = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
            unknown = {keyword.arg for keyword in node.keywords} - set(parameters) - {None}
            assert takes_any or not unknown, (ast.unparse(node), unknown)


MODULES = {"torch", "nn", "dist", "functional", "signal", "peft", "dcp", "zeroamp"}


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path)], ids=name)
def test_modules_and_classes_in_blocks_are_imported(path):
    """Names of a reader's own things, such as `model` and `loader`, need no import."""
    known, used = set(dir(builtins)), set()
    for node in (node for _, code in blocks(path) for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Name):
            (known if isinstance(node.ctx, ast.Store) else used).add(node.id)
    assert {each for each in used - known if each in MODULES or re.match(r"[A-Z]\w*[a-z]", each)} == set()


def _public(function):
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "zeroamp":
        return getattr(zeroamp, function.attr, None) if function.attr in zeroamp.__all__ else None
    return None


def _run(codes):
    names = {"__name__": "page"}
    with model_on_another_device("page"):
        for code in codes:
            exec(compile(code, "page", "exec"), names)
    return dist.get_world_size()


RUNNING = {path: [code for is_fragment, code in blocks(path) if not is_fragment] for path in PAGES}


@pytest.mark.parametrize("path", [path for path, codes in RUNNING.items() if codes], ids=name)
def test_the_blocks_of_a_page_run(ranks2, path):
    assert ranks2.run(_run, RUNNING[path]) == [2, 2]


@pytest.mark.parametrize("page", ["config.md", "accumulation.md", "deepspeed-api.md", "messages.md", "precision.md"])
def test_tables_are_what_the_code_generates(page):
    text = (ROOT / "docs" / page).read_text()
    assert "<!-- generated: " in text
    assert text == generator().render(text), "run: python docs/generate.py"
    for key in iter_keys(Config) if page == "config.md" else ():
        assert f"`{key.path}`" in text, key.path
    assert page != "precision.md" or all(table in text for table in generator().precision_tables().values())


def test_the_api_page_lists_every_public_name():
    """The page of the site: the repository's has no list."""
    listed = re.findall(r"^::: [\w.]+\.(\w+)$", generator().api_sections(), re.MULTILINE)
    assert sorted(listed) == sorted(zeroamp.__all__)


def _used_names(code):
    return {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "zeroamp"
    }


def test_every_public_name_has_an_example_that_runs():
    """In a block of a page, the README or an example. Errors have a row in messages.md instead."""
    codes = [code for path in (ROOT / "README.md", *PAGES) for is_fragment, code in blocks(path) if not is_fragment]
    codes += [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    shown = set().union(*map(_used_names, codes))
    shown |= set(re.findall(r"^\| `(\w+Error)` \|", (ROOT / "docs" / "messages.md").read_text(), re.MULTILINE))
    assert set(zeroamp.__all__) - shown == set()


def test_the_messages_of_the_site_are_those_of_the_source():
    """Also texts of helper functions, both branches of a choice, and logged ones."""
    found = generator("messages").all_messages()
    names = {name for name in zeroamp.__all__ if name.endswith("Error")} - {"ZeroAmpError"}
    assert set(found) == names | {"UnsupportedError", "Warnings"}
    assert sum(map(len, found.values())) > 400
    for name, part in (
        ("WrapError", "… was called outside of the model's forward, where … is sharded. Call a unit as module(x)"),
        ("ConfigError", "… must be a whole number from 1 on, but is …."),
        ("StepError", "so they are not supported. For first derivatives, call torch.autograd.grad(loss, inputs)"),
        ("Warnings", "… has no units below its root: at stage 3 all of its parameters are unsharded at once."),
    ):
        assert [text for text in found[name] if part in text], (name, part)


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'zeroamp[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api.html").read_text().count('class="doc doc-heading"') > len(zeroamp.__all__)
