"""Loads what `--model`, `--inputs` and `--loss` name: a folder with a transformers `config.json`, or a function.

A function is `package.module:function` or `path/to/file.py:function`. It is imported and called, which runs its code.
Models are built on the meta device: shapes, classes and names, no weights.
"""

import importlib
import inspect
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.policies.errors import WrapError


def takes_mesh(source: str) -> bool:
    """Return whether `source` names a factory with an argument `mesh`. A factory is imported.

    Raises:
        WrapError: there is no such factory.
    """
    return not Path(source).is_dir() and "mesh" in inspect.signature(load_function(source, "--model")).parameters


def load_model(source: str, mesh: DeviceMesh | None = None) -> nn.Module:
    """Build the model that `source` names under `torch.device("meta")`. Nothing is downloaded.

    Args:
        source: a folder with a transformers `config.json`, built in fp32 from its `architectures`, or as a causal
            language model if it has none; or a factory, a callable without arguments that returns a module.
        mesh: of a factory that `takes_mesh`. It is passed as the argument `mesh`.

    Raises:
        WrapError: there is no such model, or building it failed. The text has the class and text of the error.
    """
    is_folder = Path(source).is_dir()
    build: Callable[..., Any] = _folder_factory(Path(source)) if is_folder else load_function(source, "--model")
    try:
        with torch.device("meta"):
            model = build() if mesh is None else build(mesh=mesh)
    except WrapError:
        raise
    except (Exception, SystemExit) as error:
        raise WrapError(
            f'--model {source}: building it under torch.device("meta") raised {type(error).__name__}: {error}. Tensors '
            "have no values there, so a factory must not read or load any. A model with custom code needs a factory."
        ) from error
    if not isinstance(model, nn.Module):
        raise WrapError(f"--model {source} must return a torch.nn.Module, but returns a {type(model).__name__}.")
    return model


def load_function(source: str, option: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" or "path/to/file.py:function" names.

    Modules in the current directory and in the folder of the file can be imported. A file is imported under its own
    name, so that a config's "file.Class" is a class of this module, not of a copy.

    Raises:
        WrapError: there is no such function, or importing it failed.
    """
    module_name, _, name = source.rpartition(":")
    file = Path(module_name).resolve() if module_name.endswith(".py") else None
    if not (module_name and name and (file is None or file.is_file())):
        or_folder = "a folder with a transformers config.json (of a hub's: download it), " * (option == "--model")
        raise WrapError(
            f"{option} {source} does not exist. It must be {or_folder}package.module:function or "
            "path/to/file.py:function."
        )
    for folder in (Path.cwd(), *([] if file is None else [file.parent])):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name if file is None else file.stem)
        found = getattr(module, "__file__", None)
        if file is not None and (found is None or Path(found).resolve() != file):
            raise ImportError(
                f"a module named {file.stem!r} is already in use ({found or 'a built-in one'}). Rename the file"
            )
        function: object = operator.attrgetter(name)(module)
    except (Exception, SystemExit) as error:
        raise WrapError(
            f"{option} {source}: importing it raised {type(error).__name__}: {error}. Check the name, and that "
            "importing only defines things."
        ) from error
    if not callable(function) or isinstance(function, nn.Module):
        raise WrapError(
            f"{option} {source} must be a function, but is a {type(function).__name__}. For a model, name the function "
            "that builds it: it is called on the meta device."
        )
    return function


def _folder_factory(folder: Path) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        if not (folder / "config.json").is_file():
            raise WrapError(
                f"--model {folder} has no config.json. Write one with save_pretrained of the model's config."
            )
        try:
            transformers: Any = importlib.import_module("transformers")
        except ModuleNotFoundError as error:
            raise WrapError(f"--model {folder} needs transformers: pip install 'zeroamp[examples]'.") from error
        # trust_remote_code is passed because transformers would ask on the terminal otherwise.
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # zeroamp stores parameters in fp32, whatever dtype a checkpoint has. Sub-configs have a dtype too: the
        # constructor builds parts of the model from them.
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part.dtype = torch.float32
        if not config.architectures:
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
            return model
        name = config.architectures[0]
        architecture = getattr(transformers, name, None)
        if not (isinstance(architecture, type) and issubclass(architecture, nn.Module)):
            raise WrapError(
                f"--model {folder}: transformers {transformers.__version__} has no model class {name!r}, which "
                "architectures in config.json names. Install one that has it, or name a factory instead."
            )
        return architecture(config)

    return build
