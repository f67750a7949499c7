"""Builds the model that `--model` names on the meta device: shapes, classes and names, no weights.

The text names a folder with a transformers `config.json`, or a factory: `package.module:factory` or
`path/to/file.py:factory`. A factory is imported and called, which runs its code.
"""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.policies.errors import WrapError

_FUNCTION = '"package.module:function" or "path/to/file.py:function"'
_MODEL = f"a folder with a transformers config.json, {_FUNCTION}"


def check_source(source: str) -> None:
    """Check that `source` can name a model, without importing anything.

    Raises:
        WrapError: the folder has no `config.json`, the file does not exist, or the text has another form.
    """
    where = f"model {source!r}"
    if Path(source).is_dir():
        _check_folder(Path(source), where)
        return
    module_name, _ = _split(source, where, _MODEL)
    if module_name.endswith(".py"):
        _check_file(Path(module_name), where)


def takes_mesh(source: str) -> bool:
    """Return whether `source` names a factory with an argument `mesh`. A factory is imported.

    Raises:
        WrapError: there is no such factory.
    """
    if Path(source).is_dir():
        return False
    return "mesh" in inspect.signature(_load_function(source, f"model {source!r}", _MODEL)).parameters


def load_model(source: str, mesh: DeviceMesh | None = None) -> nn.Module:
    """Build the model that `source` names under `torch.device("meta")`. Nothing is downloaded.

    Args:
        source: a folder with a transformers `config.json`, built in fp32 from its `architectures`, or as a causal
            language model if it has none; or a factory, a callable without arguments that returns a module. Modules in
            the current directory and in the folder of a factory's file can be imported.
        mesh: of a factory that `takes_mesh`. It is passed as the argument `mesh`.

    Raises:
        WrapError: there is no such model, or building it failed. The text has the class and text of the error.
    """
    where = f"model {source!r}"
    if Path(source).is_dir():
        return _from_folder(Path(source), where)
    factory = _load_function(source, where, _MODEL)

    try:
        with torch.device("meta"):
            model = factory() if mesh is None else factory(mesh=mesh)
    except (Exception, SystemExit) as error:
        given = "without arguments" if mesh is None else "with the mesh"
        raise WrapError(
            f'{where} raised {_raised(error)}. It is called {given} under torch.device("meta"): tensors have no values '
            "there, so it must not read or load any."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise WrapError(
            f"{where} must return a torch.nn.Module, but returns a {type(model).__name__}. Return the module."
        )
    return model


def load_inputs(source: str) -> Callable[..., Any]:
    """Return the function of (batch, seq) that "package.module:function" or "path/to/file.py:function" names.

    Raises:
        WrapError: there is no such function.
    """
    return _load_function(source, f"inputs {source!r}", _FUNCTION)


def _raised(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _check_folder(folder: Path, where: str) -> None:
    if not (folder / "config.json").is_file():
        remedy = "Write one with save_pretrained of the model or of its config."
        raise WrapError(f"{where} must be a folder with a transformers config.json, but has none. {remedy}")


def _from_folder(folder: Path, where: str) -> nn.Module:
    _check_folder(folder, where)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise WrapError(f"{where} needs transformers to be built: pip install 'zeroamp[examples]'.") from error
    try:
        # trust_remote_code is passed because transformers would ask on the terminal otherwise.
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        build = _architecture(transformers, config, where)
        # zeroamp stores parameters in fp32, whatever dtype a checkpoint has. Sub-configs have a dtype too: the
        # constructor builds parts of the model from them.
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part.dtype = torch.float32
        with torch.device("meta"):
            model: nn.Module = build(config)
    except WrapError:
        raise
    except Exception as error:
        raise WrapError(
            f"{where}: transformers {transformers.__version__} cannot build a model from config.json "
            f"({_raised(error)}). Correct the file, or name a factory instead: a model with custom code needs one."
        ) from error
    return model


def _architecture(transformers: Any, config: Any, where: str) -> Callable[[Any], nn.Module]:
    """Return the class or function that builds the model of `config` in fp32."""
    if not config.architectures:
        causal: Callable[[Any], nn.Module] = transformers.AutoModelForCausalLM.from_config
        return causal
    architecture = getattr(transformers, config.architectures[0], None)
    if not (isinstance(architecture, type) and issubclass(architecture, nn.Module)):
        raise WrapError(
            f"{where}: architectures in its config.json must be a model class of transformers "
            f"{transformers.__version__}, but is {config.architectures}. Install a transformers that has it, or name a "
            "factory instead."
        )
    return architecture


def _split(source: str, where: str, valid: str) -> tuple[str, str]:
    """Return the module, or the path of its file, and the name of the function."""
    module_name, _, name = source.rpartition(":")
    if not (module_name and name):
        remedy = "Check the path."
        if Path(source).suffix == ".py":
            remedy = "Append the name of a function, after a colon."
        elif re.fullmatch(r"[\w.-]+/[\w.-]+", source):
            remedy = "Check the path. For a model of the Hugging Face hub, download its config.json into a folder."
        raise WrapError(f"{where} must be {valid}. {remedy}")
    return module_name, name


def _load_function(source: str, where: str, valid: str) -> Callable[..., Any]:
    module_name, name = _split(source, where, valid)
    module = _import_file(Path(module_name), where) if module_name.endswith(".py") else _import(module_name, where)
    function: object = getattr(module, name, None)
    if callable(function) and not isinstance(function, nn.Module):
        return function
    if isinstance(function, nn.Module):
        remedy = "Name the function that builds it: it is called on the meta device."
        raise WrapError(f"{where} is a module that is built already. {remedy}")
    found = f"{name} is a {type(function).__name__}" if hasattr(module, name) else f"there is no {name!r}"
    defined = [key for key, value in vars(module).items() if _is_function_of(module, value)]
    raise WrapError(
        f"{where} must be a function, but {found} in {module.__name__!r}. Name one of those that it defines: "
        f"{', '.join(defined) or 'none'}."
    )


def _is_function_of(module: ModuleType, value: object) -> bool:
    is_of_module = getattr(value, "__module__", None) == module.__name__
    return callable(value) and is_of_module and not isinstance(value, nn.Module)


def _import(name: str, where: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise WrapError(
            f"{where}: importing {name!r} from {str(Path.cwd())!r} raised {_raised(error)}. Check the name, and that "
            "importing it only defines things."
        ) from error


def _check_file(path: Path, where: str) -> None:
    if not path.is_file():
        raise WrapError(f"{where}: there is no file {str(path.resolve())!r}. Check the path.")


def _import_file(path: Path, where: str) -> ModuleType:
    """Import a file under its own name, so that a config's "file.Class" is a class of this module, not of a copy."""
    _check_file(path, where)
    path = path.resolve()
    _make_importable(Path.cwd())
    _make_importable(path.parent)
    loaded = sys.modules.get(path.stem)
    if loaded is not None:
        if (file := getattr(loaded, "__file__", None)) and Path(file).resolve() == path:
            return loaded
        used = file or "a built-in one"
        raise WrapError(f"{where}: a module named {path.stem!r} is already in use ({used}). Rename the file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise AssertionError(f"expected a loader for {path}, got {spec}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # before it runs, as `import` does: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(path.stem, None)
        remedy = "Correct the file. Importing it should only define things."
        raise WrapError(f"{where}: importing the file raised {_raised(error)}. {remedy}") from error
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
