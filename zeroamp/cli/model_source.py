"""Loads what `--model`, `--inputs` and `--loss` name: a folder with a transformers `config.json`, or a function.

A function is `package.module:function` or `path/to/file.py:function`. It is imported and called, which runs its code.
Models are built on the meta device: shapes, classes and names, no weights.
"""

import pkgutil
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroamp.policies.errors import WrapError, nearest

if TYPE_CHECKING:
    from torch import nn


def load_model(source: str) -> "nn.Module":
    """Build the model that `source` names under `torch.device("meta")`. Nothing is downloaded.

    Args:
        source: a folder with a transformers `config.json`, built in fp32 from its `architectures`, or as a causal
            language model if it has none; or a factory, a callable that returns a module.

    Raises:
        WrapError: there is no such model, or building it failed. The text has the class and text of the error.
    """
    import torch
    from torch import nn

    is_folder = Path(source).is_dir()
    if is_folder and not (Path(source) / "config.json").is_file():
        raise WrapError(
            f"--model {source} has no config.json of transformers. Name a folder that has one, or a factory."
        )
    build: Callable[..., Any] = load_function(source, "--model") if not is_folder else partial(_build, Path(source))
    try:
        with torch.device("meta"):
            model = build()
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            raise WrapError(
                f"--model {source} is a folder of transformers, which is not installed. Run pip install transformers."
            ) from error
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
    module, _, name = source.rpartition(":")
    if not module or not name:
        other = "is no folder and " if option == "--model" else ""
        raise WrapError(f"{option} {source} {other}names no function. {_what_to_write(source, option)}")
    file = Path(module) if module.endswith(".py") else None
    for folder in (Path.cwd(), *([] if file is None else [file.resolve().parent])):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        function: Callable[..., Any] = pkgutil.resolve_name(f"{module if file is None else file.stem}:{name}")
        if not callable(function):
            raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    except (Exception, SystemExit) as error:
        names = vars(sys.modules.get(module if file is None else file.stem, object))
        hint = nearest(name, (each for each in names if not each.startswith("_")))
        or_folder = "a folder with a transformers config.json, " * (option == "--model")
        raise WrapError(
            f"{option} {source} must be {or_folder}package.module:function or path/to/file.py:function, but importing "
            f"it raised {type(error).__name__}: {error}. {hint}".strip()
        ) from error
    return function


def _what_to_write(source: str, option: str) -> str:
    """Return a sentence for a `source` without a function: a file, the name of a model of a hub, or another text."""
    if source.endswith(".py"):
        return f"Write {source}:function."
    if option == "--model" and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        folder = source.partition("/")[2]
        return (
            "If it is a model of the Hugging Face hub, download its config.json and name the folder: "
            f"hf download {source} config.json --local-dir {folder}"
        )
    or_folder = "Name a folder with a transformers config.json, or write " * (option == "--model") or "Write "
    return f"{or_folder}package.module:function or path/to/file.py:function."


def _build(folder: Path) -> "nn.Module":
    import torch
    import transformers

    # trust_remote_code is passed because transformers would ask on the terminal otherwise.
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # zeroamp stores parameters in fp32, whatever dtype a checkpoint has. Sub-configs have a dtype too: the
    # constructor builds parts of the model from them.
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = torch.float32
    if config.architectures:
        model: nn.Module = getattr(transformers, config.architectures[0])(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model
