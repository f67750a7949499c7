"""What a build takes in: the linked folders too, also from a tree in which the links are text files."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter

import pytest

import zeroamp
from tests.measuring.sources import ROOT

BUILD = ["pip", "wheel", "--quiet", "--no-deps", "--no-cache-dir", "--wheel-dir"]


def _copy(folder, *, with_links):
    """Copy what a build needs; without links, they become text files, as in a zip download."""
    for name in ("zeroamp", "hooks", "policies"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder / name)
    for name in () if with_links else ("hooks", "policies"):
        link = folder / "zeroamp" / name
        target = str(link.readlink())
        link.unlink()
        link.write_text(target)


def _run(folder, *command):
    return subprocess.run(
        [sys.executable, *command], check=False, cwd=folder, capture_output=True, text=True, timeout=240
    )


def test_a_tree_without_links_gets_them(tmp_path):
    """As of a zip download: a build restores the links. What is no text of a link is refused."""
    _copy(tmp_path, with_links=False)
    (tmp_path / "zeroamp" / "policies").write_text("another text")
    result = _run(tmp_path, "setup.py", "bdist_wheel")
    assert result.returncode != 0
    assert "zeroamp/policies must be a symbolic link" in result.stderr
    assert str((tmp_path / "zeroamp" / "hooks").readlink()) == "../hooks"
    (tmp_path / "zeroamp" / "policies").write_text("../policies")
    assert _run(tmp_path, "setup.py", "--version").returncode == 0
    assert str((tmp_path / "zeroamp" / "policies").readlink()) == "../policies"


def test_type_checkers_find_an_editable_install(tmp_path):
    """It is a path in a .pth file: mypy and editors run no import hooks."""
    _copy(tmp_path, with_links=True)
    build = "from setuptools.build_meta import build_editable; print(build_editable('dist'))"
    name = _run(tmp_path, "-c", build).stdout.splitlines()[-1]
    editable = zipfile.ZipFile(tmp_path / "dist" / name)
    (path,) = (each for each in editable.namelist() if not each.startswith("zeroamp-"))
    assert path.endswith(".pth")
    assert (tmp_path / editable.read(path).decode().strip()).samefile(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["tree", "zip", "sdist"])
def test_a_wheel_has_every_module_and_data_file(tmp_path, source):
    """A wheel from the tree, from a zip download of it, or from the sdist has every module and data file."""
    _copy(tmp_path, with_links=source != "zip")
    sdist = "from setuptools.build_meta import build_sdist; print(build_sdist('dist'))"
    built = "." if source != "sdist" else f"./dist/{_run(tmp_path, '-c', sdist).stdout.splitlines()[-1]}"
    result = _run(tmp_path, "-m", *BUILD, "wheels", built)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("wheels/*.whl")
    wheel = zipfile.ZipFile(path)
    packed = {name: wheel.read(name) for name in wheel.namelist()}
    info = f"zeroamp-{zeroamp.__version__}.dist-info"
    metadata = packed[f"{info}/METADATA"].decode()
    assert "# zeroamp" in metadata
    assert "](" not in metadata, "a relative link of the README is dead on a package index"
    assert packed[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    layers = {"hooks": "zeroamp/hooks", "policies": "zeroamp/policies", "zeroamp": "zeroamp"}
    files = {f"{inside}/{path.relative_to(ROOT / top)}": path for top, inside in layers.items() for path in _files(top)}
    assert {name: text for name, text in packed.items() if not name.startswith(info)} == {
        name: path.read_bytes() for name, path in files.items()
    }


def _files(top):
    folder = ROOT / top
    return [
        path
        for path in folder.rglob("*.*")
        if path.is_file() and path.suffix != ".pyc" and not any(parent.is_symlink() for parent in path.parents)
    ]


def test_each_package_has_one_lowest_release():
    """`make test-lowest` installs it: two bounds of one package would contradict each other."""
    requirements = re.findall(
        r'^ +"([\w-]+)(?:\[.*\])?>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert {"torch", "pydantic", "transformers"} < {package for package, _ in requirements}
    twice = [package for package, count in Counter(package for package, _ in set(requirements)).items() if count > 1]
    assert twice == []
