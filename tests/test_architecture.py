"""What the import contract in pyproject.toml cannot see, and that what is public is documented."""

import ast
import inspect

import pytest

import zeroamp
from tests.measuring.sources import ROOT, python_files

LAYERS = ("policies", "hooks", "zeroamp")


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_are_absolute_and_name_the_package(layer):
    """The order of the packages is a contract of import-linter (`make lint`), which cannot see these."""
    for path in python_files(layer):
        for node in ast.walk(ast.parse(path.read_text())):
            assert getattr(node, "level", 0) == 0, f"{path.name} has a relative import"
        bare = {name.partition(".")[0] for name in _imports(path)} & {"policies", "hooks"}
        assert not bare, f"{path.name}: a bare import loads a second copy"


def test_policies_do_not_touch_torch_distributed():
    for path in python_files("policies"):
        assert "import torch.distributed" not in path.read_text(), path.name
        assert "from torch.distributed" not in path.read_text(), path.name


def test_all_names_exist_are_sorted_and_documented():
    assert zeroamp.__all__ == sorted(zeroamp.__all__)
    for public in zeroamp.__all__:
        value = getattr(zeroamp, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{public} has no docstring"


@pytest.mark.parametrize("folder", ["oracles", "models"])
def test_oracles_and_models_import_nothing_of_ours(folder):
    for path in python_files(f"tests/{folder}"):
        assert "zeroamp" not in [name.split(".")[0] for name in _imports(path)], path.name


def test_no_test_imports_from_another_test_file():
    for path in python_files("tests"):
        found = [name for name in _imports(path) if name.startswith("tests.") and ".test_" in name]
        assert found == [], path.name


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_the_version_is_the_one_of_the_package():
    assert f'version = "{zeroamp.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {zeroamp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {zeroamp.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
