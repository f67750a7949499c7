"""Finds the modules that own each parameter, its names and its units, and raises for parameters that cannot be used."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from zeroamp.planning.mesh import local_part
from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import WrapError


@dataclass(slots=True)
class ParameterUses:
    """The names, owning modules and units of one parameter."""

    parameter: nn.Parameter
    fqns: list[str]
    owners: dict[nn.Module, str]  # owner -> its first FQN
    chains: list[tuple[str, ...]]  # per use: FQNs of the units around it, outermost first

    def named_owners(self) -> list[tuple[nn.Module, str]]:
        """Return (owner, the name it has for the parameter)."""
        return [
            (owner, name)
            for owner in self.owners
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
            if parameter is self.parameter
        ]


def has_own_storage_class(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a tensor subclass. `nn.Parameter` and its subclasses do not count.

    For a DTensor (tensor or expert parallelism), the class of this rank's part counts.
    """
    if isinstance(parameter, DTensor):
        return type(local_part(parameter.detach())) is not torch.Tensor
    return not issubclass(type(parameter), nn.Parameter)


def find_uses(model: nn.Module, units: Iterable[str]) -> list[ParameterUses]:
    """Return the names, owners and units of each parameter.

    Walks the module tree once. Modules that are registered at several paths are visited at each path.
    """
    unit_names = {model.get_submodule(unit): unit for unit in units}
    chains: dict[str, tuple[str, ...]] = {}
    uses: dict[nn.Parameter, ParameterUses] = {}
    for module_fqn, module in model.named_modules(remove_duplicate=False):
        around = chains[module_fqn.rpartition(".")[0]] if module_fqn else ()
        # A unit is known by its module, not by its path: a block that is registered twice is one unit.
        chain = (*around, unit_names[module]) if module in unit_names else around
        chains[module_fqn] = chain
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            use = uses.setdefault(parameter, ParameterUses(parameter, [], {}, []))
            use.fqns.append(f"{module_fqn}.{name}" if module_fqn else name)
            use.owners.setdefault(module, module_fqn)
            use.chains.append(chain)
    return list(uses.values())


def modules_around(fqn: str) -> Iterator[str]:
    """Yield the FQNs of the modules around a module or tensor, outermost first, without the root."""
    parts = fqn.split(".")
    yield from (".".join(parts[:depth]) for depth in range(1, len(parts)))


def innermost_common(chains: Sequence[tuple[str, ...]]) -> str:
    """Return the innermost unit that contains all uses; "" is the root.

    Args:
        chains: per use, the FQNs of the units around it, outermost first.
    """
    common = ""
    for level in zip(*chains, strict=False):
        if len(set(level)) > 1:
            break
        common = level[0]
    return common


def refuse_unready(use: ParameterUses) -> None:
    """Raise WrapError for a parameter that has no shape yet."""
    parameter, fqn = use.parameter, use.fqns[0]
    if is_lazy(parameter):
        raise WrapError(f"{fqn} has no shape yet. Run one forward of the model before wrap_model.")


def refuse_unusable(use: ParameterUses) -> None:
    """Raise WrapError for a parameter that cannot be sharded, or that cannot be trained in its dtype."""
    refuse_unready(use)
    parameter, fqn = use.parameter, use.fqns[0]
    if has_own_storage_class(parameter) and not hasattr(local_part(parameter.detach()), "fsdp_pre_all_gather"):
        raise WrapError(
            f"{fqn} is a {type(parameter).__name__}, a tensor subclass without fsdp_pre_all_gather, so FSDP2 cannot "
            "all-gather it. Wrap a model of plain parameters, and convert it afterwards if the subclass allows that."
        )
    if hasattr(parameter, "SCB"):  # Int8Params
        raise WrapError(
            f"{fqn} is quantized to 8 bits by bitsandbytes, whose modules read attributes of the parameter that its "
            "shards do not have. Load the base model in 4 bits (load_in_4bit=True) or in bf16."
        )
    if getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False):
        raise WrapError(
            f"{fqn} was packed by bitsandbytes for inference on the CPU, in a forward in evaluation mode. Call "
            "model.train() before the first forward, or wrap the model before the first forward."
        )
    if parameter.requires_grad and parameter.is_complex():
        raise WrapError(
            f"{fqn} is trainable and complex, so neither fp32 shards nor fp32 sums can hold it. Store "
            "torch.view_as_real of it as the parameter, and call torch.view_as_complex in the forward; or pass it in "
            "ignored_params."
        )
    if parameter.requires_grad and stored_dtype(parameter) != torch.float32:
        raise WrapError(
            f"{fqn} is trainable, so it must be stored in fp32, bf16 or fp16, but is stored in "
            f"{short_name(parameter.dtype)}. Call .float() on its module before wrap_model, or freeze it."
        )
    _refuse_hooks(parameter, fqn)
    if parameter.requires_grad:
        _refuse_lookups(use)


def _refuse_lookups(use: ParameterUses) -> None:
    """Raise WrapError for an embedding table that the forward writes to, or whose gradient is sparse.

    The forward would write to the unsharded parameter. The sharded parameter, which is trained, would not change.
    """
    fqn = use.fqns[0]
    for owner in use.owners:
        if not isinstance(owner, nn.Embedding | nn.EmbeddingBag) or use.parameter is not owner.weight:
            continue
        if owner.max_norm is not None:
            raise WrapError(
                f"{fqn} is the table of an {type(owner).__name__} with max_norm, whose forward renormalizes rows in "
                "place. That would not change the shards. Set max_norm to None and normalize the output, freeze the "
                "parameter, or pass it in ignored_params."
            )
        if owner.sparse:
            raise WrapError(
                f"{fqn} is the table of an {type(owner).__name__} with sparse=True, whose gradient is sparse. FSDP2 "
                "reduces dense gradients only. Set sparse to False, freeze the parameter, or pass it in ignored_params."
            )


def _refuse_hooks(parameter: nn.Parameter, fqn: str) -> None:
    """Raise WrapError if a parameter has hooks: its sharded parameter is another object, without them.

    Scalars and parameters without elements are not sharded, and retain their hooks.
    """
    if parameter.dim() == 0 or parameter.numel() == 0:
        return
    if getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise WrapError(
            f"{fqn} has a hook of register_post_accumulate_grad_hook, which its sharded parameter would not have. "
            "Register the hook after wrap_model: it then runs after each reduction, with the sharded gradient. Or pass "
            "the parameter in ignored_params."
        )
    if parameter._backward_hooks:
        raise WrapError(
            f"{fqn} has a hook of register_hook, which its sharded parameter would not have. Autograd never runs hooks "
            "of sharded parameters. Change its grad between train.clip_grad_norm() and train.update(), or pass the "
            "parameter in ignored_params, where its gradient is not reduced."
        )


def quantization_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the `quant_state` of bitsandbytes' packed weights, which dequantization reads.

    These tensors are neither parameters nor buffers.
    """
    for fqn, parameter in model.named_parameters():
        yield from _tensors_of(getattr(parameter, "quant_state", None), f"{fqn}.quant_state")


def _tensors_of(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif type(value).__module__.startswith("bitsandbytes."):
        for key, inner in sorted(vars(value).items()):
            yield from _tensors_of(inner, f"{name}.{key}")
