"""From what `--model` names to a module on the meta device: shapes, classes and names, no weights.

A folder with a transformers `config.json`, or a factory: `package.module:factory` or `path/to/file.py:factory`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zeroamp.policies.errors import WrapError, describe

_FORMS = 'a folder with a transformers config.json, "package.module:factory" or "path/to/file.py:factory"'
_INPUT_FORMS = '"package.module:function" or "path/to/file.py:function"'


@dataclass(frozen=True, slots=True)
class _Named:
    """What an option of a command names, in the words of its errors."""

    source: str
    what: str = "model"
    forms: str = _FORMS
    missing: str = "no folder, and no name of a factory"
    function: str = "a callable without arguments that returns a module"

    @property
    def where(self) -> str:
        return f"{self.what} {self.source!r}"


def load_model(source: str) -> nn.Module:
    """Build the model that `source` names under `torch.device("meta")`. Nothing is downloaded.

    Args:
        source: a folder with a transformers `config.json`, built in fp32 from its `architectures`, or as a causal
            language model where it names none; or a factory, a callable without arguments that returns a module. The
            current directory is importable, and so is the folder of a factory's file.

    Raises:
        WrapError: there is no such model, or building it failed. The text has the type and text of what was raised.
    """
    path = Path(source)
    if path.is_dir():
        return _from_folder(path)
    return _call(source, _load(_Named(source)))


def load_inputs(source: str) -> Callable[..., object]:
    """Return the function of (batch, seq) that "package.module:function" or "path/to/file.py:function" names.

    Raises:
        WrapError: there is none.
    """
    function = "a callable of (batch, seq) that returns what the forward takes"
    return _load(_Named(source, "inputs", _INPUT_FORMS, "no name of a function", function))


def _load(named: _Named) -> Callable[..., object]:
    module_name, colon, factory_name = named.source.rpartition(":")
    if not (module_name and colon and factory_name):
        is_python = Path(named.source).suffix == ".py"
        remedy = "Append the name of a function, after a colon." if is_python else "Check the path."
        raise WrapError(describe(named.where, named.missing, named.forms, remedy))
    is_file = module_name.endswith(".py")
    module = _import_file(named, Path(module_name)) if is_file else _import_named(named, module_name)
    return _factory(named, module, factory_name)


def _where(source: object) -> str:
    return _Named(str(source)).where


def _raised(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _from_folder(folder: Path) -> nn.Module:
    if not (folder / "config.json").is_file():
        valid = "a folder with a transformers config.json"
        remedy = "save_pretrained of the model, or of its config alone, writes one."
        raise WrapError(describe(_where(folder), "a folder without config.json", valid, remedy))
    transformers = _transformers(folder)
    try:
        # trust_remote_code is said because transformers would ask on the terminal otherwise.
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        build = _architecture(folder, transformers, config)
        # zeroamp stores in fp32 whatever dtype a checkpoint was saved in: a part that the constructor builds from its
        # own config would take that config's dtype.
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part.dtype = torch.float32
        with torch.device("meta"):
            model: nn.Module = build(config)
    except WrapError:
        raise
    except Exception as error:
        found = f"a config.json that transformers {transformers.__version__} builds no model from ({_raised(error)})"
        remedy = "Mend the file, or name a factory instead: a model with code of its own needs one."
        raise WrapError(
            describe(_where(folder), found, "the config of a model that transformers has", remedy)
        ) from error
    return model


def _transformers(folder: Path) -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        found = "a folder for transformers, which is not installed"
        raise WrapError(describe(_where(folder), found, _FORMS, "pip install zeroamp[examples]")) from error


def _architecture(folder: Path, transformers: Any, config: Any) -> Callable[[Any], nn.Module]:
    """Return what builds the model of `config` in its default dtype, fp32."""
    if not config.architectures:
        causal: Callable[[Any], nn.Module] = transformers.AutoModelForCausalLM.from_config
        return causal
    name = config.architectures[0]
    architecture = getattr(transformers, name, None)
    if not (isinstance(architecture, type) and issubclass(architecture, nn.Module)):
        found = f"architectures {config.architectures} in its config.json"
        valid = f"a model class of transformers {transformers.__version__}"
        remedy = "Install a transformers that has it, or name a factory instead."
        raise WrapError(describe(_where(folder), found, valid, remedy))
    return architecture


def _import_named(named: _Named, name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        remedy = (
            f"Looked for {name!r} from {str(Path.cwd())!r}: check the name, and that importing it only defines things."
        )
        raise WrapError(
            describe(named.where, f"a module that does not import ({_raised(error)})", named.forms, remedy)
        ) from error


def _import_file(named: _Named, path: Path) -> ModuleType:
    """Import a file under its own name, so that a config's "file.Class" is a class of this module, not of a copy."""
    path = path.resolve()
    if not path.is_file():
        raise WrapError(describe(named.where, f"no file at {str(path)!r}", named.forms, "Check the path."))
    _make_importable(Path.cwd())
    _make_importable(path.parent)
    loaded = sys.modules.get(path.stem)
    if loaded is not None:
        if (where := getattr(loaded, "__file__", None)) and Path(where).resolve() == path:
            return loaded
        found = f"a file whose name is that of a module in use ({where or 'a built-in one'})"
        raise WrapError(describe(named.where, found, "a file with a name of its own", "Rename the file."))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise AssertionError(f"expected a loader for {path}, got {spec}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # before it runs, as `import` does: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(path.stem, None)
        remedy = "Mend the file; importing it should only define things."
        found = f"a file that does not import ({_raised(error)})"
        raise WrapError(describe(named.where, found, named.forms, remedy)) from error
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _factory(named: _Named, module: ModuleType, name: str) -> Callable[..., object]:
    factory: object = getattr(module, name, None)
    if callable(factory) and not isinstance(factory, nn.Module):
        return factory
    names = [key for key, value in vars(module).items() if _is_factory(value, module)]
    valid = f"{named.function}; defined there: {', '.join(names) or 'none'}"
    if isinstance(factory, nn.Module):
        found = "a module that is built already"
        remedy = "Name the function that builds it: it is called on the meta device."
    elif hasattr(module, name):
        found, remedy = f"{name!r}, a {type(factory).__name__}", "Name a function."
    else:
        found, remedy = f"no {name!r} in {module.__name__!r}", "Check the name."
    raise WrapError(describe(named.where, found, valid, remedy))


def _is_factory(value: object, module: ModuleType) -> bool:
    return (
        callable(value) and getattr(value, "__module__", None) == module.__name__ and not isinstance(value, nn.Module)
    )


def _call(source: str, factory: Callable[..., object]) -> nn.Module:
    valid = "a callable without arguments that returns a torch.nn.Module"
    try:
        with torch.device("meta"):
            model = factory()
    except (Exception, SystemExit) as error:
        remedy = 'It is called under torch.device("meta"), where tensors hold no values to read or to load.'
        raise WrapError(describe(_where(source), f"a factory that raised {_raised(error)}", valid, remedy)) from error
    if not isinstance(model, nn.Module):
        found = f"a factory that returned a {type(model).__name__}"
        raise WrapError(describe(_where(source), found, valid, "Return the module itself."))
    return model
