"""`Extension`: what a config key adds to a run from a package outside of the core, and the moments at which it does.

The table `zeroamp.EXTENSIONS` names a class of `Extension` for each such key. The core imports the class only if the
key is on (neither false nor "auto"), or has the value that follows "=" in the table. It calls the methods at these
moments, in this order:

| method | called by | moment |
|---|---|---|
| `check_config` | `policy_from_config` | all keys have values |
| `fp32_regions` | `build_plan` | the units are known |
| `safe_precisions` | `build_plan` | mode "autocast": before the classes of modules decide the precisions |
| `precisions` | `build_plan` | each parameter has a precision |
| `check_model` | `wrap_model` | the plan is made, and nothing was communicated |
| `check_mesh` | `wrap_model` | the plan and the mesh are the same on all ranks |
| `attach` | `wrap_model` | the model is sharded and has its hooks |
| `attach_arithmetic` | `Step` | a `TrainStep` or an observed step is made |
| `check_optimizer` | `TrainStep` | for each optimizer |
| `attach_step` | `TrainStep` | at the end of its constructor |
| `add_traffic` | `plan_traffic` | the collectives of an optimizer step are counted |

A config without such keys has no extensions.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zeroamp.hooks.collectives.traffic import Traffic
    from zeroamp.planning.fp32_regions import Fp32Regions
    from zeroamp.planning.mesh import Ranks
    from zeroamp.planning.mesh_axes import MeshAxes
    from zeroamp.planning.parameter_uses import ParameterUses
    from zeroamp.planning.plan import Plan
    from zeroamp.planning.safe_parameters import Precision
    from zeroamp.policies.policy import Policy
    from zeroamp.training.optimizer_step import Step
    from zeroamp.training.step import TrainStep
    from zeroamp.wrapping.state import WrapState


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

    def fp32_regions(self, model: "nn.Module", policy: "Policy") -> "Fp32Regions | None":
        """Return the modules and tensors that stay in fp32 in every mode; None for none."""

    def safe_precisions(
        self,
        model: "nn.Module",
        policy: "Policy",
        uses: "Sequence[ParameterUses]",
        example_inputs: Any,
        device_type: str | None,
    ) -> "Sequence[Precision] | None":
        """Return the precisions of the parameters `uses`, without fp32 regions and overrides. None: by their classes.

        `example_inputs` and `device_type` are the arguments of `build_plan`.
        """

    def precisions(
        self,
        model: "nn.Module",
        policy: "Policy",
        uses: "Sequence[ParameterUses]",
        precisions: "Iterable[Precision]",
    ) -> "Iterable[Precision]":
        """Return the precisions of the parameters `uses`, in their order."""
        del model, policy, uses
        return precisions

    def check_model(self, model: "nn.Module", plan: "Plan") -> None:
        """Raise ConfigError or WrapError if the key does not fit the model."""

    def check_mesh(self, model: "nn.Module", plan: "Plan", axes: "MeshAxes") -> None:
        """Raise ConfigError or WrapError if the key does not fit the ranks. `axes`: those of the mesh."""

    def attach(self, model: "nn.Module", state: "WrapState") -> None:
        """Change the hooks of the sharded model."""

    def attach_arithmetic(self, step: "Step") -> None:
        """Replace how the optimizer steps divide losses and gradients, and add them."""

    def check_optimizer(self, optimizer: "torch.optim.Optimizer", *, on_shards: bool) -> None:
        """Raise StepError if the key does not fit an optimizer. `on_shards`: the argument of `TrainStep`."""

    def attach_step(self, train: "TrainStep") -> None:
        """Change a `TrainStep`, or append callbacks to it."""

    def add_traffic(self, plan: "Plan", ranks: "Ranks", traffic: "Traffic") -> None:
        """Add this key's collectives of one optimizer step to `traffic`."""


def load(key: str) -> Any:
    """Import and return what `zeroamp.EXTENSIONS` lists under `key`."""
    from zeroamp import EXTENSIONS  # not at the top, where `zeroamp` is only partly imported

    module, _, name = EXTENSIONS[key].partition(":")
    return getattr(import_module(module), name)


def extensions_of(policy: "Policy", model: "nn.Module | None" = None) -> tuple[Extension, ...]:
    """Return new extensions of the keys that are on in a config, each class once, in the order of `EXTENSIONS`.

    Also of what `EXTENSIONS` lists and `model` has: classes of parameters, such as quantized ones, and attributes of
    modules.
    """
    from zeroamp import EXTENSIONS

    classes = set() if model is None else {type(parameter).__name__ for parameter in model.parameters()}

    def is_on(key: str) -> bool:
        block, _, rest = key.rpartition(".")
        name, _, value = rest.partition("=")
        if block == "model":
            return model is not None and any(getattr(module, name, None) for module in model.modules())
        found = getattr(policy, name, None)
        return found == value if value else bool(found and found != "auto") or name in classes

    keys = {home: key for key, home in EXTENSIONS.items() if is_on(key)}
    return tuple(load(key)() for key in keys.values())
