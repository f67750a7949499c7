"""What every rank runs in the tests of optimizers, and each optimizer that `docs/optimizers.md` has a row of."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import zeroamp
from tests.oracles import one_process
from tests.processes.training import SmallTraining, config, same_bits
from zeroamp.training.update import kind_of

NAME = "matrices"
LR = 1e-2
NUM_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One optimizer, and how a `TrainStep` gets it."""

    path: str
    """Module and class."""
    arguments: dict[str, Any] = field(default_factory=dict)
    on_shards: bool = False
    matrices_only: bool = False
    """Whether it updates the hidden weights of two dimensions, and AdamW the others."""

    @property
    def library(self) -> str:
        return self.path.partition(".")[0]

    def make(self, parameters: dict[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
        module, _, name = self.path.rpartition(".")
        optimizer_class: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module(module), name)
        if not self.matrices_only:
            optimizers = [optimizer_class(list(parameters.values()), **self.arguments)]
        else:
            hidden = [fqn for fqn, p in parameters.items() if p.dim() == 2 and not fqn.startswith(("embed", "head"))]
            others = [parameter for fqn, parameter in parameters.items() if fqn not in hidden]
            matrices = optimizer_class([parameters[fqn] for fqn in hidden], **self.arguments)
            optimizers = [matrices, torch.optim.AdamW(others, lr=LR)]
        set_mode(optimizers, "train")
        return optimizers


def set_mode(optimizers: list[torch.optim.Optimizer], mode: str) -> None:
    """Call `train()` or `eval()` of optimizers that have it: schedule-free ones swap the parameters."""
    for optimizer in optimizers:
        getattr(optimizer, mode, lambda: None)()


def _torch(name, **arguments):
    return Case(path=f"torch.optim.{name}", arguments={"lr": LR, **arguments})


def _other(path, **more):
    arguments = {"lr": LR, **more.pop("arguments", {})}
    return Case(path=path, arguments=arguments, **more)


_PLAIN = ("AdamW", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
CASES = {
    **{f"`torch.optim.{name}`": _torch(name) for name in _PLAIN},
    "`torch.optim.SGD`": _torch("SGD", momentum=0.9),
    "`torch.optim.Muon`, with AdamW": _other("torch.optim.Muon", matrices_only=True),
    "`torch.optim.Adafactor`": _torch("Adafactor"),
    "`torch.optim.SparseAdam`": _torch("SparseAdam"),
    "`torch.optim.LBFGS`": _torch("LBFGS"),
    "`torchao.optim.AdamW8bit`": _other("torchao.optim.AdamW8bit"),
    "`torchao.optim.AdamW4bit`": _other("torchao.optim.AdamW4bit"),
    "`torchao.optim.AdamWFp8`": _other("torchao.optim.AdamWFp8"),
    "`zeroamp.Bf16StatesAdamW`": _other("zeroamp.Bf16StatesAdamW"),
    "`transformers.Adafactor`": _other(
        "transformers.Adafactor", arguments={"relative_step": False, "scale_parameter": False}
    ),
    "`schedulefree.AdamWScheduleFree`": _other("schedulefree.AdamWScheduleFree"),
    "`schedulefree.SGDScheduleFree`": _other("schedulefree.SGDScheduleFree"),
    "`optimi.AdamW`": _other("optimi.AdamW"),
    "`optimi.Lion`": _other("optimi.Lion"),
    "`bitsandbytes.optim.AdamW8bit`": _other("bitsandbytes.optim.AdamW8bit", on_shards=True),
    "`bitsandbytes.optim.Lion8bit`": _other("bitsandbytes.optim.Lion8bit", on_shards=True),
    "`bitsandbytes.optim.AdamW`": _other("bitsandbytes.optim.AdamW", on_shards=True),
    "`bitsandbytes.optim.LAMB`": _other("bitsandbytes.optim.LAMB", on_shards=True),
}
"""Row of the docs' table -> how it is made."""


def expected(case):
    """The parameters after some steps in one process, plain torch; those of the evaluation if they differ."""
    parameters, optimizers = {}, []

    def make(of_model):
        parameters.update(of_model)
        optimizers.extend(case.make(of_model))
        return optimizers

    with torch.compiler.set_stance("force_eager"):
        one_process.train(NAME, world_size=2, num_steps=NUM_STEPS, make_optimizers=make)
        set_mode(optimizers, "eval")
    return {fqn: parameter.detach().clone() for fqn, parameter in parameters.items()}


class Training(SmallTraining):
    """A model trained with one case, on this rank."""

    def __init__(self, case, stage, seed=0):
        def make(_):
            return case.make(dict(self.model.named_parameters()))

        options = {"on_shards": case.on_shards, "prepare_before": lambda model: _reseed(model, seed)}
        super().__init__(config(stage), make, name=NAME, **options)
        self.optimizers = self.optimizer

    def run(self, start, stop):
        with torch.compiler.set_stance("force_eager"):
            for index in range(start, stop):
                self.step(index)
        return self

    def parameters(self):
        set_mode(self.optimizers, "eval")
        found = super().parameters()
        set_mode(self.optimizers, "train")
        return found

    def state(self):
        """{(parameter, key): (class or dtype, whether it is sharded, bytes of its tensors)} of this rank."""
        names = {parameter: fqn for fqn, parameter in self.model.named_parameters()}
        return {
            (names[parameter], key): _described(value)
            for optimizer in self.optimizers
            for parameter, entries in optimizer.state.items()
            for key, value in entries.items()
        }


def _reseed(model, seed):
    if seed:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.normal_(generator=generator)


def _described(value):
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, value, []
    local = value.to_local() if isinstance(value, DTensor) else value
    parts = local.__tensor_flatten__()[0] if hasattr(type(local), "__tensor_flatten__") else []
    kind = type(local).__name__ if parts else str(local.dtype).removeprefix("torch.")
    tensors = [getattr(local, part) for part in parts] or [local]
    copies = [tensor.detach().clone().reshape(-1).view(torch.uint8) for tensor in tensors]
    return kind, isinstance(value, DTensor), copies


def _same_state(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        ours[key][:2] == theirs[key][:2] and all(map(torch.equal, ours[key][2], theirs[key][2])) for key in theirs
    )


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one optimizer did."""

    stage: int | None = None
    """At which stage it was tried; None: refused at all."""
    refusal: str = ""
    """The error at stage 3."""
    updated: str = ""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    state: frozenset[str] = frozenset()
    is_resumed_exactly: bool = False
    reshard: str = ""
    """The error, or empty if the state was resharded and training went on with the same bits."""


def tried(name, folder):
    """Train, save, resume and reshard with one optimizer, at stage 3, or at stage 0 if that is refused."""
    case, refusal = CASES[name], ""
    for stage in (3, 0):
        try:
            whole = Training(case, stage)
        except zeroamp.ZeroAmpError as error:
            refusal = refusal or str(error)
            continue
        whole.run(0, 2)
        zeroamp.save_checkpoint(folder, whole.model, whole.train)
        saved = whole.state()
        end = whole.run(2, NUM_STEPS).parameters()
        other = Training(case, stage, seed=5)
        zeroamp.load_checkpoint(folder, other.model, other.train)
        is_same = _same_state(other.state(), saved)
        is_exact = is_same and same_bits(other.run(2, NUM_STEPS).parameters(), end) == []
        return Found(
            stage=stage,
            refusal=refusal,
            updated=kind_of(whole.optimizers[0], on_shards=case.on_shards),
            parameters=end,
            state=frozenset(kind for kind, _, _ in saved.values() if kind not in ("int", "NoneType")),
            is_resumed_exactly=is_exact,
            reshard=_reshard(case, folder, end) if stage == 3 else "not tried",
        )
    return Found(refusal=refusal)


def _reshard(case, folder, end):
    """Go on at stage 0, where the one shard of a parameter is all of it."""
    other = Training(case, 0, seed=6)
    try:
        zeroamp.load_checkpoint(folder, other.model, other.train)
    except zeroamp.CheckpointError as error:
        return str(error)
    differing = same_bits(other.run(2, NUM_STEPS).parameters(), end)
    return f"other bits: {differing}" if differing else ""
