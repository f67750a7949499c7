"""zeroamp: torch.autocast numerics and ZeRO stages on native PyTorch FSDP2, from a DeepSpeed-style config.

Public names are listed in `__init__.pyi`, and imported at their first use. `import zeroamp` itself imports nothing
else, not even torch, so that reading the version does not wait for FSDP2.
"""

import ast
from importlib import import_module
from pathlib import Path

from zeroamp.version import __version__ as __version__


def _public_names(file: str) -> dict[str, str]:
    """Return public name -> the module that defines it, from the `import … as …` of a package's stub."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {each.name: str(node.module) for node in imports for each in node.names if each.asname}
    del homes["__version__"]  # imported above
    return homes


_HOMES = _public_names(__file__)

EXTENSIONS = {
    "zeroamp.overrides": "zeroamp.module_dtypes.extension:ModuleDtypes",
    "data_types.keep_in_fp32_modules": "zeroamp.module_dtypes.extension:ModuleDtypes",
    "model._keep_in_fp32_modules": "zeroamp.module_dtypes.extension:ModuleDtypes",
    "model._keep_in_fp32_modules_strict": "zeroamp.module_dtypes.extension:ModuleDtypes",
    "zeroamp.reproducible": "zeroamp.reproducible.extension:Reproducible",
    "zeroamp.param_gather_dtype": "zeroamp.float8.extension:Float8",
    "data_types.optimizer_states_dtype": "zeroamp.optimizers.bf16_states:OptimizerStates",
    "zeroamp.offload_between_steps": "zeroamp.host_memory.between_steps:OffloadBetweenSteps",
    "torch.distributed.tensor.DTensor": "zeroamp.meshes.partial_gradients:PartialGradients",
    "torch_autocast.lower_precision_safe_modules=auto": "zeroamp.discovery.extension:Discovery",
    "build_plan.find_optional": "zeroamp.module_dtypes.optional_units:find_optional",
    "Ledger.plan_traffic": "zeroamp.dry_run.planned_traffic:plan_traffic",
    "Ledger.bytes_per_step": "zeroamp.dry_run.planned_traffic:bytes_per_step",
    "Ledger.text": "zeroamp.reporting.ledger_tables:ledger_text",
    "Ledger.parameter_text": "zeroamp.reporting.ledger_tables:parameter_text",
    "Verification.text": "zeroamp.reporting.ledger_tables:verification_text",
    "validate.explain": "zeroamp.policies.schema.config_errors:explain",
    "policy_from_config.fill_auto": "zeroamp.policies.auto_values:fill_auto",
    "Policy.key_report": "zeroamp.reporting.key_report:render_report",
    "optimizer.types": "zeroamp.optimizers.optimizer_params:TYPES",
    "scheduler.types": "zeroamp.optimizers.scheduler_params:TYPES",
    "wrap_model.round_sums": "zeroamp.accumulation.shard_accumulator:round_sums",
    "wrap_model.find_axes": "zeroamp.meshes.axes:find_axes",
    "wrap_model.refuse_combinations": "zeroamp.meshes.refused_meshes:refuse_combinations",
    "StepAllReduce.gradients_of_copies": "zeroamp.meshes.tensor_parallel_replicas:GradientsOfCopies",
    "wrap_model.materialize_model": "zeroamp.weights.materialize:materialize_model",
    "wrap_model.nodes_of_mesh": "zeroamp.two_level.layout:nodes_of_mesh",
    "TrainStep.kind_of_other": "zeroamp.optimizers.kinds:kind_of_other",
    "TrainStep.refuse_other": "zeroamp.optimizers.kinds:refuse_other",
    "optimizer.step.prepare_other": "zeroamp.optimizers.kinds:prepare_other",
    "TrainStep.shard_state": "zeroamp.optimizers.loaded_state:shard_state",
    "TrainStep.shard_state_dict": "zeroamp.optimizers.loaded_state:shard_state_dict",
    "TrainStep.resolve_overrides": "zeroamp.optimizers.kinds:resolve_overrides",
    "TrainStep.replicated_apart": "zeroamp.optimizers.kinds:replicated_apart",
    "TrainStep.refuse_on_two_axes": "zeroamp.meshes.tensor_parallel_replicas:refuse_on_two_axes",
    "torch.optim.Muon": "zeroamp.optimizers.muon:updating_matrices",
}
"""Name -> a class or function that is loaded at its first use, as "module:name".

The name is a config key, "key=value", the class of a parameter or "model." and an attribute of a module, for an
`Extension` (`zeroamp/policies/extensions.py`); or the class of an optimizer or an attribute of the core, which loads
the function at its first use. The core (policies, hooks, planning, wrapping, training, ledger) depends on other
packages only through this table. Extensions are called in its order: float8 chooses among the weights that no override
names."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=import_module(__name__))
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # later uses find it here, without `__getattr__`
    return value


def __dir__() -> list[str]:
    return ["__version__", *__all__]
