"""`Extension`: what a config key adds to a run from a package outside of the core, and the moments at which it does.

The table `zeroamp.EXTENSIONS` names a class of `Extension` for each such key. The core imports the class only if the
key is on (neither false nor "auto"), or has the value that follows "=" in the table. Each package of the core has a
subclass with the methods that it calls, so a class inherits those of the moments at which it acts:

| class | methods | called by |
|---|---|---|
| `Extension` | `check_config` | `policy_from_config`, when all keys have values |
| | `check_optimizer` | `TrainStep`, for each optimizer |
| `PlanExtension` (`planning/precisions.py`) | `fp32_regions`, `safe_precisions`, `precisions` | `build_plan` |
| `WrapExtension` (`wrapping/extensions.py`) | `check_model`, `check_mesh`, `attach` | `wrap_model` |
| | `add_traffic` | `plan_traffic` |
| `ArithmeticExtension` (`training/optimizer_step.py`) | `attach_arithmetic` | `Step` |
| `StepExtension` (`training/step.py`) | `attach_step` | `TrainStep`, at the end of its constructor |

A config without such keys has no extensions.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zeroamp.policies.policy import Policy


class Extension:
    """What one config key adds to a run. Here every method does nothing; a subclass overrides those that it needs."""

    needs_train_step = ""
    """A plain `optimizer.step()` would ignore the key: the key and its value, for the error. "" if it would not."""

    data_axes_only = ""
    """The key, if it is not supported with a context, tensor or expert axis. "" if it is."""

    model_may_cast = False
    """Whether the model itself may cast parameters that are all-gathered in low precision. Then their modules may run
    with autocast off, unless they are of the default safe classes."""

    def check_config(self, policy: "Policy") -> None:
        """Raise ConfigError if other keys of the config contradict this one."""

    def check_optimizer(self, optimizer: "torch.optim.Optimizer", *, on_shards: bool) -> None:
        """Raise StepError if the key does not fit an optimizer. `on_shards`: the argument of `TrainStep`."""


E = TypeVar("E", bound=Extension)


def of_class(extensions: Iterable[Extension], moments: type[E]) -> list[E]:
    """Return those of `extensions` that act at the moments of a class, in their order."""
    return [extension for extension in extensions if isinstance(extension, moments)]


def extensions_of(policy: "Policy", model: "nn.Module | None" = None) -> tuple[Extension, ...]:
    """Return new extensions of the keys that are on in a config, each class once, in the order of `EXTENSIONS`.

    Also of what `EXTENSIONS` lists and `model` has: classes of parameters, such as quantized ones, and attributes of
    modules.
    """
    from zeroamp import EXTENSIONS  # not at the top, where `zeroamp` is only partly imported

    classes = set() if model is None else {type(parameter).__name__ for parameter in model.parameters()}

    def is_on(key: str) -> bool:
        block, _, rest = key.rpartition(".")
        name, _, value = rest.partition("=")
        if block == "model":
            return model is not None and any(getattr(module, name, None) for module in model.modules())
        found = getattr(policy, name, None)
        return found == value if value else bool(found and found != "auto") or name in classes

    homes = dict.fromkeys(home for key, home in EXTENSIONS.items() if is_on(key))
    return tuple(_load(home)() for home in homes)


def _load(home: str) -> type[Extension]:
    """Import and return the class that `EXTENSIONS` writes as "module:name"."""
    module, _, name = home.partition(":")
    extension: type[Extension] = getattr(import_module(module), name)
    return extension
