"""Loads what `--model`, `--inputs` and `--loss` name: a folder with a transformers `config.json`, or a function.

A function is `package.module:function` or `path/to/file.py:function`. It is imported and called, which runs its code.
Models are built on the meta device: shapes, classes and names, no weights.
"""

import inspect
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroamp.hooks._torch.fake_ranks import fake_ranks
from zeroamp.planning.mesh import current_device_type
from zeroamp.policies.errors import WrapError


@contextmanager
def model_and_mesh(source: str, sizes: Mapping[str, int] | None) -> Iterator[tuple[nn.Module, DeviceMesh | None]]:
    """Return the model that `--model` names, and the mesh of `--mesh`, which consists of ranks that do not exist."""
    if sizes is None:
        yield load_model(source), None
        return
    with fake_ranks(math.prod(sizes.values())):
        mesh = init_device_mesh(current_device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        yield load_model(source, mesh), mesh


def load_model(source: str, mesh: DeviceMesh | None = None) -> nn.Module:
    """Build the model that `source` names under `torch.device("meta")`. Nothing is downloaded.

    Args:
        source: a folder with a transformers `config.json`, built in fp32 from its `architectures`, or as a causal
            language model if it has none; or a factory, a callable that returns a module.
        mesh: is passed to the factory as the argument `mesh`.

    Raises:
        WrapError: there is no such model, or building it failed. The text has the class and text of the error.
    """
    is_folder = Path(source).is_dir()
    build: Callable[..., Any] = load_function(source, "--model") if not is_folder else partial(_build, Path(source))
    if mesh is not None and "mesh" not in inspect.signature(build).parameters:
        raise WrapError(
            f"--model {source} must be a factory with an argument mesh, because --mesh is given: return the model "
            "after parallelize_module over mesh. Or pass --world-size: a rank then holds no less."
        )
    try:
        with torch.device("meta"):
            model = build() if mesh is None else build(mesh=mesh)
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
    module, _, name = source.rpartition(":")
    file = Path(module) if module.endswith(".py") else None
    for folder in (Path.cwd(), *([] if file is None else [file.resolve().parent])):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        function: Callable[..., Any] = pkgutil.resolve_name(f"{module if file is None else file.stem}:{name}")
        if not callable(function):
            raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    except (Exception, SystemExit) as error:
        or_folder = "a folder with a transformers config.json (of a hub's: download it), " * (option == "--model")
        raise WrapError(
            f"{option} {source} must be {or_folder}package.module:function or path/to/file.py:function, but importing "
            f"it raised {type(error).__name__}: {error}."
        ) from error
    return function


def _build(folder: Path) -> nn.Module:
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
