"""`deepspeed.zero`: `Init` and `GatheredParameters` for plain and for sharded parameters."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from zeroamp.deepspeed.comm import init_distributed
from zeroamp.deepspeed.refused import missing, refusal
from zeroamp.hooks.tensors import map_tensors
from zeroamp.planning.mesh import current_device_type, device_of_type, local_part
from zeroamp.policies.errors import StepError
from zeroamp.weights.full_tensors import full_parameter, set_full_parameter
from zeroamp.wrapping.state import wrap_state

REPLACED = "_zeroamp_replaced"
"""Attribute that marks a parameter that `initialize` has replaced. A script may still refer to it."""

_COPY, _STATUS = "_zeroamp_whole", "ds_status"
_ids = count()


class ZeroParamStatus(Enum):
    """The `ds_status` of a sharded parameter: AVAILABLE (whole) inside `GatheredParameters`, else NOT_AVAILABLE."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
    """Never used here."""


def mark_sharded(module: nn.Module) -> None:
    """Set DeepSpeed's attributes on each sharded parameter of a wrapped model, by which scripts recognise one.

    They are `ds_id`, `ds_status`, `ds_shape`, `ds_numel` and `ds_tensor` (this rank's shard). At stage 0 no parameter
    gets them, since each rank has whole parameters.
    """
    if wrap_state(module).plan.policy.stage == 0:
        return
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            held = {"ds_id": next(_ids), "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
            held["ds_tensor"] = local_part(parameter.detach())
            vars(parameter).update({**held, _STATUS: ZeroParamStatus.NOT_AVAILABLE})


@contextmanager
def Init(*_: object, enabled: bool = True, **options: object) -> Iterator[None]:  # noqa: N802 - a class in DeepSpeed
    """Return a context for building a model. It does not shard: `initialize` shards the model.

    Each rank holds the whole model in CPU memory until `initialize`. For a larger model use
    `with torch.device("meta")` instead: `initialize` then initialises one module at a time, on shards.

    Args:
        enabled: whether to initialise the process group on entering.
        options: `data_parallel_group`, `mpu` and a `remote_device` other than the CPU are refused. The others have no
            effect: `initialize` reads the config, and stores trainable parameters in fp32.
    """
    for name in ("data_parallel_group", "mpu", "remote_device"):
        if options.get(name) not in (None, "none", "cpu"):
            raise refusal(f"zero.Init({name}=)", "Leave it out: parameters are sharded over all ranks.")
    if enabled:
        init_distributed()
    yield


class _WholeCopies(TorchFunctionMode):
    """Runs all operations and tensor attributes of some sharded parameters on their whole copies.

    The parameter must stay the same Python object, because the caller holds it. So its class and data stay, and this
    mode, which torch asks before each operation of the thread, replaces it by the copy.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the whole copies."""
        del types
        args, kwargs = map_tensors(lambda each: vars(each).get(_COPY, each), (args, kwargs or {}))
        return func(*args, **kwargs)


@contextmanager
def GatheredParameters(  # noqa: N802 - a class in DeepSpeed
    params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """Return a context in which sharded parameters are whole: `parameter.data` and all operations are of plain tensors.

    All ranks enter it with the same parameters, and each holds whole copies inside. With `modifier_rank`, all ranks
    get that rank's values at the end. Without it, and in a parameter that an outer context has made whole, changes are
    lost. Before `initialize`, parameters are whole anyway, and only `modifier_rank` has an effect.

    Args:
        params: a parameter, or an iterable of parameters or of pairs of name and parameter. With `modifier_rank`, a set
            must contain sharded parameters only.
        modifier_rank: the rank whose values all ranks get at the end. None: parameters are only read.
        fwd_module: has no effect: a module's forward unshards its own parameters.
        enabled: if False, the context does nothing.

    Raises:
        StepError: on entering, a parameter is from before `initialize`; or, with `modifier_rank`, `params` is a set
            with a parameter that is not sharded.
    """
    del fwd_module
    parameters = _parameters(params, sends=modifier_rank is not None) if enabled else []
    if any(vars(parameter).get(REPLACED, False) for parameter in parameters):
        raise StepError(
            "GatheredParameters was given a parameter from before initialize(), which has replaced it. Read it again, "
            "from engine.module.named_parameters()."
        )
    copies: dict[Any, nn.Parameter] = {}
    try:
        for parameter in parameters:
            if isinstance(parameter, DTensor) and _COPY not in vars(parameter):
                whole = nn.Parameter(full_parameter(parameter), requires_grad=parameter.requires_grad)
                copies[parameter] = vars(parameter)[_COPY] = whole
                _set_status(parameter, ZeroParamStatus.AVAILABLE)
        with _WholeCopies():
            yield
    finally:
        for parameter in copies:
            del vars(parameter)[_COPY]
            _set_status(parameter, ZeroParamStatus.NOT_AVAILABLE)
    if modifier_rank is not None:  # and no error
        for parameter in parameters:
            if parameter in copies:
                set_full_parameter(parameter, _values_of(copies[parameter], modifier_rank))
            elif not isinstance(parameter, DTensor):
                _values_of(parameter, modifier_rank)


def _set_status(parameter: Any, status: ZeroParamStatus) -> None:
    if hasattr(parameter, _STATUS):
        setattr(parameter, _STATUS, status)


def _values_of(tensor: nn.Parameter, source: int) -> torch.Tensor:
    """Set a tensor of all ranks, in place, to the values of one rank. Return it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor.data
    sent = tensor.data.to(device_of_type(current_device_type())).contiguous()  # NCCL refuses tensors on the CPU
    dist.broadcast(sent, src=source)
    return tensor.data.copy_(sent)


def _parameters(params: Any, *, sends: bool) -> list[nn.Parameter]:
    each: Iterable[Any] = [params] if isinstance(params, torch.Tensor) else params
    found = [one[1] if isinstance(one, tuple) else one for one in each]
    parameters = list({id(one): one for one in found if isinstance(one, nn.Parameter)}.values())
    if isinstance(params, set | frozenset):  # its order differs between ranks, which must communicate in one order
        if sends and not all(hasattr(one, "ds_id") for one in parameters):
            raise StepError(
                "GatheredParameters was given modifier_rank, and a set with parameters that are not sharded. The order "
                "of a set differs between ranks. Pass a list."
            )
        parameters.sort(key=lambda one: vars(one).get("ds_id", -1))
    return parameters


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: planning puts a parameter that another module reads into a unit that contains both modules."""


def __getattr__(name: str) -> Any:
    return missing(__name__, name, ("GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"))
