"""`deepspeed.zero`: `Init` and `GatheredParameters` for plain and for sharded parameters."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from zeroamp.deepspeed.comm import init_distributed
from zeroamp.deepspeed.parameters import REPLACED
from zeroamp.deepspeed.refused import missing, refusal
from zeroamp.hooks.tensors import map_tensors
from zeroamp.planning.mesh import current_device_type, device_of, device_of_type, local_part
from zeroamp.policies.errors import StepError
from zeroamp.weights.full_tensors import full_parameter, owner_of, set_full_parameter
from zeroamp.wrapping.state import wrap_state

_COPY, _STATUS = "_zeroamp_whole", "ds_status"
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


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
    for index, parameter in enumerate(module.parameters()):
        if isinstance(parameter, DTensor):
            held = {"ds_id": index, "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
            held["ds_tensor"] = local_part(parameter.detach())
            vars(parameter).update({**held, _STATUS: ZeroParamStatus.NOT_AVAILABLE})


class Init(AbstractContextManager["Init"]):
    """A context for building a model. It does not shard: the model is built as usual, and `initialize` shards it.

    Each rank holds the whole model in CPU memory until `initialize`. For a larger model use
    `with torch.device("meta")` instead: `initialize` then initialises one module at a time, on shards.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: object = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: object = None,
        config: object = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: object = None,
        **others: object,
    ) -> None:
        """Take DeepSpeed's arguments.

        Args:
            module: has no effect.
            data_parallel_group: refused: parameters are sharded over the default group.
            mem_efficient_linear: has no effect.
            remote_device: "cpu", "none" or None; others are refused.
            pin_memory: has no effect.
            config_dict_or_path: has no effect: `initialize` reads the config.
            config: has no effect.
            enabled: whether to initialise the process group on entering.
            dtype: has no effect: trainable parameters are stored in fp32, and the config decides their `param_dtype`.
            mpu: refused.
            others: refused unless None or False.
        """
        del module, mem_efficient_linear, pin_memory, config_dict_or_path, config, dtype
        if remote_device not in (None, "none", "cpu"):
            raise refusal(f"zero.Init(remote_device={remote_device!r})", "Shards are on the device or on the CPU.")
        for name, value in {"data_parallel_group": data_parallel_group, "mpu": mpu, **others}.items():
            if value is not None and value is not False:
                raise refusal(f"zero.Init({name}=)", "Leave it out: parameters are sharded over all ranks.")
        self._enabled = enabled

    def __enter__(self) -> "Init":
        if self._enabled:
            init_distributed()
        return self

    def __exit__(self, *_: object) -> None:
        return


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
        if func == _GET_DATA:
            # `detach` shares the version counter of the whole copy, `data` does not: so changes are detected.
            return args[0].detach()
        return func(*args, **kwargs)


class GatheredParameters(AbstractContextManager[None]):
    """A context in which sharded parameters are whole: `parameter.data` and all operations are those of plain tensors.

    All ranks enter it with the same parameters, and each holds whole copies inside. With `modifier_rank`, all ranks
    get that rank's values at the end. Without it, a change in place raises, because it would be lost. Before
    `initialize`, parameters are whole anyway, and only `modifier_rank` has an effect.

    Raises:
        StepError: on entering, a parameter is from before `initialize`, or an outer context has made it whole and
            `modifier_rank` is given. On leaving, a parameter was changed in place without `modifier_rank`.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        """Take a parameter, or an iterable of parameters or of pairs of name and parameter.

        Args:
            params: parameters of wrapped or plain models.
            modifier_rank: the rank whose values all ranks get at the end. None: parameters are only read.
            fwd_module: has no effect: a module's forward unshards its own parameters.
            enabled: if False, the context does nothing.
        """
        del fwd_module
        self._parameters: list[Any] = _parameters(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._versions: dict[Any, tuple[int, int]] = {}  # sharded parameter -> version of the whole copy made here
        self._mode = _WholeCopies()

    def __enter__(self) -> None:
        try:
            for parameter in self._parameters:
                self._gather(parameter)
        except StepError:
            self._release()
            raise
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _gather(self, parameter: Any) -> None:
        if _COPY in vars(parameter):
            if self._modifier_rank is not None:
                raise StepError(
                    f"GatheredParameters with modifier_rank was given a parameter of shape {tuple(parameter.shape)} "
                    "that an outer GatheredParameters has made whole. Pass modifier_rank to the outer one."
                )
        elif isinstance(parameter, DTensor):  # a parameter, too: `nn.Parameter` is an attribute of a DTensor
            whole = nn.Parameter(full_parameter(cast(nn.Parameter, parameter)), requires_grad=parameter.requires_grad)
            self._versions[parameter] = _version(whole)
            vars(parameter)[_COPY] = whole
            if hasattr(parameter, _STATUS):
                setattr(parameter, _STATUS, ZeroParamStatus.AVAILABLE)
        elif vars(parameter).get(REPLACED, False):
            raise StepError(
                f"GatheredParameters was given a parameter of shape {tuple(parameter.shape)} from before "
                "initialize(), which has replaced it. Read it again, from engine.module.named_parameters()."
            )

    def _release(self) -> tuple[dict[Any, torch.Tensor], list[tuple[int, ...]]]:
        """Remove the whole copies. Return them, and the shapes of those that were changed."""
        held, changed = {}, []
        for parameter, version in self._versions.items():
            held[parameter] = whole = vars(parameter).pop(_COPY)
            if hasattr(parameter, _STATUS):
                setattr(parameter, _STATUS, ZeroParamStatus.NOT_AVAILABLE)
            if _version(whole) != version:
                changed.append(tuple(whole.shape))
        self._versions.clear()
        return held, changed

    def __exit__(self, error_type: type[BaseException] | None, *error: Any) -> None:
        self._mode.__exit__(error_type, *error)  # type: ignore[no-untyped-call]
        held, changed = self._release()
        if error_type is not None:
            return
        if self._modifier_rank is None and changed:
            raise StepError(
                f"A parameter of shape {changed[0]} had an in-place modification inside GatheredParameters without "
                "modifier_rank, so the change is lost. Pass modifier_rank=0 and write on that rank."
            )
        if self._modifier_rank is not None:
            for parameter in self._parameters:
                _spread(parameter, held.get(parameter, parameter), self._modifier_rank)


def _version(whole: torch.Tensor) -> tuple[int, int]:
    """Return two numbers, of which one changes when the tensor is changed in place or `data` is assigned."""
    return whole._version, whole.data_ptr()


@torch.no_grad()
def _spread(parameter: nn.Parameter, values: torch.Tensor, source: int) -> None:
    """Set a parameter of all ranks to the values of one rank."""
    if not isinstance(parameter, DTensor):
        if dist.is_initialized() and dist.get_world_size() > 1:
            sent = values.data.to(device_of_type(current_device_type()))  # NCCL refuses tensors on the CPU
            dist.broadcast(sent, src=source)
            values.data.copy_(sent)
        return
    state, _ = owner_of(parameter)
    sent = values.detach().to(device_of(state.mesh)).contiguous()
    dist.broadcast(sent, src=source)
    set_full_parameter(parameter, sent)


def _parameters(params: Any) -> list[nn.Parameter]:
    each: Iterable[Any] = [params] if isinstance(params, torch.Tensor) else params
    found = [one[1] if isinstance(one, tuple) else one for one in each]
    return list({id(one): one for one in found if isinstance(one, nn.Parameter)}.values())


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: planning puts a parameter that another module reads into a unit that contains both modules."""


def __getattr__(name: str) -> Any:
    return missing(__name__, name, ("GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"))
