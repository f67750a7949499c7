"""`deepspeed.zero`: `Init` and `GatheredParameters` for plain and for sharded parameters."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.deepspeed.comm import init_distributed
from zeroamp.deepspeed.parameters import REPLACED
from zeroamp.deepspeed.refused import ZERO, Refused, refusal, unknown
from zeroamp.hooks._torch.dispatch import tree_map_only
from zeroamp.planning.mesh import device_of, local_part
from zeroamp.policies.errors import StepError
from zeroamp.training.full_tensors import full_parameter, set_full_parameter
from zeroamp.wrapping.state import owner_of, wrap_state

_COPY, _STATUS = "_zeroamp_whole", "ds_status"
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class ZeroParamStatus(Enum):
    """Whether a parameter is whole on this rank: the `ds_status` of a sharded one outside of `GatheredParameters`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
    """Never used here."""


def mark_sharded(module: nn.Module) -> None:
    """Give each sharded parameter of a wrapped model the attributes by which scripts recognise one.

    They are `ds_id`, `ds_status`, `ds_shape`, `ds_numel` and `ds_tensor`, this rank's shard. At stage 0, where each
    rank holds whole parameters, there are none.
    """
    if wrap_state(module).plan.policy.stage == 0:
        return
    for index, parameter in enumerate(module.parameters()):
        if isinstance(parameter, DTensor):
            held = {"ds_id": index, "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
            held["ds_tensor"] = local_part(parameter.detach())
            vars(parameter).update({**held, _STATUS: ZeroParamStatus.NOT_AVAILABLE})


class Init(AbstractContextManager["Init"]):
    """Lets a script build its model inside; the model gets its values as outside, and `initialize` shards it.

    Each rank holds the whole model in CPU memory until `initialize`. To build a model that is larger than that, use
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
            module: stays as it is.
            data_parallel_group: refused: the ranks are all of the default group.
            mem_efficient_linear: has no effect.
            remote_device: "cpu", "none" or None; others are refused.
            pin_memory: has no effect.
            config_dict_or_path: has no effect: `initialize` reads the config.
            config: has no effect.
            enabled: whether to initialise the process group on entering.
            dtype: has no effect: trainable parameters are stored in fp32, and the config decides in which dtype they
                are all-gathered.
            mpu: refused.
            others: refused unless None or False.
        """
        del module, mem_efficient_linear, pin_memory, config_dict_or_path, config, dtype
        if remote_device not in (None, "none", "cpu"):
            raise refusal(f"zero.Init(remote_device={remote_device!r})", "Shards live on the device or the CPU.")
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


class _Whole(DTensor):
    """The class that a sharded parameter has inside `GatheredParameters`: all operations are on its whole copy.

    The object must stay the caller's own, and a DTensor cannot become a plain tensor: its memory is laid out otherwise.
    But it may change to a subclass, whose `__torch_function__` sees every operation and every attribute of tensors.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the whole copies."""
        del types
        args, kwargs = tree_map_only(_Whole, lambda each: vars(each)[_COPY], (args, kwargs or {}))
        if func == _GET_DATA:
            # A tensor from `detach` shares the whole copy's version counter; one from `data` does not.
            return args[0].detach()
        return func(*args, **kwargs)


class GatheredParameters(AbstractContextManager[None]):
    """Makes sharded parameters whole inside: `parameter.data` and every operation are those of a plain tensor there.

    All ranks enter it with the same parameters, and each holds whole copies meanwhile. With `modifier_rank`, what that
    rank has written into them becomes the parameters of all ranks at the end. Without it, a change in place is an
    error, because it would be lost. Before `initialize`, parameters are whole, and only `modifier_rank` has an effect.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        """Take a parameter, or an iterable of parameters or of pairs of name and parameter.

        Args:
            params: of wrapped or plain models.
            modifier_rank: the rank whose values all ranks take at the end; None: nobody writes.
            fwd_module: has no effect: a module's forward unshards its own parameters.
            enabled: False does nothing.
        """
        del fwd_module
        self._parameters: list[Any] = _parameters(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._versions: dict[Any, tuple[int, int]] = {}  # of the whole copies that this context has made

    def __enter__(self) -> None:
        for parameter in self._parameters:
            if type(parameter) is DTensor:  # a parameter, too: `nn.Parameter` is an attribute of a DTensor
                whole = nn.Parameter(
                    full_parameter(cast(nn.Parameter, parameter)), requires_grad=parameter.requires_grad
                )
                self._versions[parameter] = _version(whole)
                vars(parameter)[_COPY] = whole
                if hasattr(parameter, _STATUS):
                    setattr(parameter, _STATUS, ZeroParamStatus.AVAILABLE)
                parameter.__class__ = _Whole
            elif vars(parameter).get(REPLACED, False):
                self.__exit__(StepError)
                raise StepError(
                    f"GatheredParameters was given a parameter of shape {tuple(parameter.shape)} from before "
                    "initialize(), which has replaced it. Read it again, from engine.module.named_parameters()."
                )
            elif isinstance(parameter, _Whole) and self._modifier_rank is not None:
                self.__exit__(StepError)
                raise StepError(
                    f"GatheredParameters with modifier_rank was given a parameter of shape {tuple(parameter.shape)} "
                    "that an outer GatheredParameters has made whole. Pass modifier_rank to the outer one."
                )

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        held, changed = {}, []
        for parameter, version in self._versions.items():
            parameter.__class__ = DTensor
            held[parameter] = whole = vars(parameter).pop(_COPY)
            if hasattr(parameter, _STATUS):
                setattr(parameter, _STATUS, ZeroParamStatus.NOT_AVAILABLE)
            if _version(whole) != version:
                changed.append(tuple(whole.shape))
        self._versions.clear()
        if error_type is not None:
            return
        if self._modifier_rank is None and changed:
            raise StepError(
                f"A parameter of shape {changed[0]} had an in-place modification inside GatheredParameters without "
                "modifier_rank, which is lost. Pass modifier_rank=0 and write on that rank."
            )
        if self._modifier_rank is not None:
            for parameter in self._parameters:
                _spread(parameter, held.get(parameter, parameter), self._modifier_rank)


def _version(whole: torch.Tensor) -> tuple[int, int]:
    """Return values that differ after a change in place, or after an assignment to `data`."""
    return whole._version, whole.data_ptr()


@torch.no_grad()
def _spread(parameter: nn.Parameter, values: torch.Tensor, source: int) -> None:
    """Set a parameter of all ranks to the values of one rank."""
    if not isinstance(parameter, DTensor):
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(values.data, src=source)
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
    """Do nothing: a parameter that another module reads is in the unit of both, which planning finds."""


def __getattr__(name: str) -> Any:
    if name in ZERO:
        return Refused(f"zero.{name}", ZERO[name])
    if name.startswith("__"):
        raise AttributeError(name)
    raise unknown(__name__, name, ("GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"))
