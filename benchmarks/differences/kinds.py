"""The kinds of differences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.differences.training import Kind, Layers, Run, adamw, lambda_lr, one_backward

FP16 = {"torch_autocast.enabled": False, "fp16.enabled": True}


def _key(path: str, value: Any, names: str | None = None, **more: Any) -> Kind:
    return Kind(error="WrapError", names=path if names is None else names, config={path: value}, **more)


CONFIG = {
    "gradient clipping": _key("gradient_clipping", 0.5, stages=(0, 3)),
    "accumulation count": _key("gradient_accumulation_steps", 2, stages=(0, 1, 3)),
    "stage": _key("zero_optimization.stage", 2),
    "low dtype": _key("torch_autocast.dtype", "float16"),
    "mode": Kind(
        error="WrapError",
        names="bf16.enabled",
        config={"torch_autocast.enabled": False, "torch_autocast.dtype": None, "bf16.enabled": True},
    ),
    "first loss scale": _key("fp16.initial_scale_power", 4, base=FP16),
    "loss scale window": _key("fp16.loss_scale_window", 3, base=FP16),
    "communication dtype": _key("communication_data_type", "fp32"),
    "dtype of sums over ranks": _key("zeroamp.reduce_accumulate_dtype", "native"),
    "prefetch bucket": _key("zero_optimization.stage3_prefetch_bucket_size", 5),
    "live parameters": _key("zero_optimization.stage3_max_live_parameters", 100_000),
    "persistence threshold": _key("zero_optimization.stage3_param_persistence_threshold", 10_000),
    "safe modules": _key("torch_autocast.lower_precision_safe_modules", ["Embedding"]),
    "fp32 modules": _key("data_types.keep_in_fp32_modules", ["head"]),
    "accumulation dtype": _key("data_types.grad_accum_dtype", "bf16"),
    "buffer dtype": _key("data_types.buffer_dtype", "bf16"),
    "offload": _key("zero_optimization.offload_param.device", "cpu", names="offload_param"),
    "replicas": _key("zeroamp.dp_replicate_size", 2),
    "leaf modules": _key("zero_optimization.leaf_module.classes", ["Sequential"], names="leaf_module"),
    "micro-batch size": _key("train_micro_batch_size_per_gpu", 4, names="batch_size"),
    "check of overflows": _key(
        "bf16.check_grad_overflow", True, base={"torch_autocast.enabled": False, "bf16.enabled": True}
    ),
    "sharded dimension": _key("zeroamp.shard_dim", 0),
    "optimizer of the config": Kind(
        error="WrapError", names="optimizer.params.lr", config={"optimizer.type": "AdamW", "optimizer.params.lr": 0.1}
    ),
}


def _freeze(index: int) -> Callable[[Any], None]:
    return lambda model: model.layers[index][1].requires_grad_(False)


def _half(model: Any) -> None:
    model.layers[1][1].requires_grad_(False).to(torch.bfloat16)


def _more(model: Any) -> None:
    model.extra = nn.Parameter(torch.zeros(3))


def _epsilon(model: Any) -> None:
    model.layers[2][0].eps = 1e-3


def _dropout(model: Any) -> None:
    model.layers[2][3].p = 0.1


def _reorder(model: Any) -> None:
    model.head = model._modules.pop("head")
    model.embed = model._modules.pop("embed")


def _widen(model: Any) -> None:
    model.head = nn.Linear(16, 65, bias=False)


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return Layers()


def _raise(*_: Any, **__: Any) -> Any:
    raise OSError("the disk of one rank")


MODEL = {
    "depth": Kind(error="WrapError", names="layers.3.0.weight", model=lambda: Layers(4), stages=(0, 3)),
    "tying": Kind(error="WrapError", names="head.weight", model=lambda: Layers(tied=True), stages=(0, 3)),
    "a shape": Kind(error="WrapError", names="head.weight", prepare=_widen),
    "a stored dtype": Kind(error="WrapError", names="layers.1.1.weight", prepare=_half),
    "a frozen layer": Kind(error="WrapError", names="layers.2.1.weight", prepare=_freeze(2), stages=(0, 3)),
    "one more parameter": Kind(error="WrapError", names="extra", prepare=_more),
    "the class of a module": Kind(
        error="WrapError", names="module layers.0.2", model=lambda: Layers(activation=nn.ReLU)
    ),
    "epsilon": Kind(error="WrapError", names="module layers.2.0", prepare=_epsilon),
    "dropout": Kind(error="WrapError", names="module layers.2.3", prepare=_dropout),
    "the order of modules": Kind(error="WrapError", names="in the order", prepare=_reorder),
    "initial values": Kind(error="WrapError", names="embed.weight", seed=1, stages=(0, 3)),
    "meta device": Kind(error="WrapError", names="meta device", model=_on_meta),
    "units": Kind(error="WrapError", names="in bf16", wrap=lambda: {"auto_wrap_policy": {"Linear"}}),
    "a mesh": Kind(error="WrapError", names="the mesh", wrap=lambda: {"mesh": init_device_mesh("cpu", (2,))}),
    "an error of the wrap policy": Kind(
        error="WrapError", names="rank 1", wrap=lambda: {"auto_wrap_policy": {"Missing"}}
    ),
    "a foreign error while planning": Kind(
        error="WrapError", names="OSError", wrap=lambda: {"auto_wrap_policy": map(_raise, "x")}
    ),
}


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    weights = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": weights}, {"params": biases}], lr=1e-2)


def _two(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = model.parameters()
    return [torch.optim.AdamW([first], lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


def _stepped(optimizer: torch.optim.Optimizer) -> Any:
    scheduler = lambda_lr(optimizer)
    scheduler.last_epoch += 3
    return scheduler


def _at_train_step(names: str, optimizer: Callable[[nn.Module], Any], **more: Any) -> Kind:
    return Kind(error="StepError", names=names, optimizer=optimizer, **more)


OPTIMIZER = {
    "lr": _at_train_step("lr of optimizer 0", lambda model: adamw(model, lr=1e-3), stages=(0, 3)),
    "betas": _at_train_step("betas of optimizer 0", lambda model: adamw(model, betas=(0.8, 0.999))),
    "weight decay": _at_train_step("weight_decay of", lambda model: adamw(model, weight_decay=0.3)),
    "foreach": _at_train_step("foreach of", lambda model: adamw(model, foreach=True)),
    "amsgrad": _at_train_step("amsgrad of", lambda model: adamw(model, amsgrad=True)),
    "optimizer class": _at_train_step(
        "the class of optimizer 0", lambda model: torch.optim.Adam(model.parameters(), lr=1e-2), stages=(0, 3)
    ),
    "param groups": _at_train_step("the number of param groups", _groups, stages=(0, 3)),
    "order of parameters": _at_train_step(
        "the place of embed.weight", lambda model: torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-2)
    ),
    "parameters left out": _at_train_step(
        "the place of head.weight", lambda model: torch.optim.AdamW(list(model.parameters())[:-1], lr=1e-2)
    ),
    "number of optimizers": _at_train_step("the number of optimizers", _two),
    "a foreign parameter": _at_train_step("failed on rank 1", lambda _: adamw(nn.Linear(2, 2))),
    "a scheduler": Kind(error="StepError", names="the scheduler of", scheduler=lambda_lr, stages=(0, 3)),
    "class of scheduler": Kind(
        error="StepError",
        names="the scheduler of",
        all_schedule=True,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    ),
    "state of scheduler": Kind(
        error="StepError", names="last_epoch of the scheduler", all_schedule=True, scheduler=_stepped
    ),
}


def _set(key: str, value: Any) -> Callable[[Run], None]:
    def step(run: Run) -> None:
        run.train.optimizers[0].param_groups[0][key] = value
        one_backward(run)

    return step


def _skip(index: int) -> Callable[[Run], None]:
    def step(run: Run) -> None:
        run.model.skipped = index
        one_backward(run)

    return step


def _clip(max_norm: float) -> Callable[[Run], None]:
    def step(run: Run) -> None:
        run.train.backward(run.model(run.batch()))
        run.train.clip_grad_norm(max_norm)
        run.train.update()

    return step


def _counted(count: int, **flags: Any) -> Callable[[Run], None]:
    def step(run: Run) -> None:
        for micro in range(count):
            run.train.backward(run.model(run.batch()), is_last=micro + 1 == count, **flags)
        run.train.step()

    return step


def _zero_grad(run: Run) -> None:
    run.train.backward(run.model(run.batch()), is_last=False)
    run.train.zero_grad()
    _counted(2)(run)


def _in_eval_mode(run: Run) -> None:
    run.model.eval()
    one_backward(run)


def _loaded(run: Run) -> None:
    run.train.load_state_dict({"num_steps": 7, "num_skipped": 0})
    one_backward(run)


def _loaded_scale(run: Run) -> None:
    state = run.train.state_dict()
    state["loss_scale"]["scale"] /= 2
    run.train.load_state_dict(state)
    one_backward(run)


def _other_batch(run: Run) -> None:
    run.train.backward(run.model(torch.zeros(5, 3, dtype=torch.int64)))
    run.train.step()


def _no_state(run: Run) -> None:
    run.train.optimizers[0].state.clear()
    one_backward(run)


def _pop(run: Run) -> None:
    run.train.optimizers[0].param_groups[0]["params"].pop()
    one_backward(run)


def _reverse(run: Run) -> None:
    run.train.optimizers[0].param_groups[0]["params"].reverse()
    one_backward(run)


def _at_step(names: str, step: Callable[[Run], None], **more: Any) -> Kind:
    return Kind(error="StepError", names=names, step=step, **more)


STEP = {
    "lr by hand": _at_step("lr of param group 0", _set("lr", 1e-3), stages=(0, 1, 2, 3)),
    "weight decay by hand": _at_step("weight_decay of param group 0", _set("weight_decay", 0.3)),
    "max_norm": _at_step("max_norm", _clip(0.1), all_step=_clip(0.2), stages=(0, 3)),
    "which layer is skipped": _at_step(
        "layers.1",
        _skip(1),
        all_step=_skip(2),
        stages=(0, 1, 2, 3),
    ),
    "micro-batches of the caller, stages 0 and 1": _at_step(
        "the number of backwards", _counted(3), all_step=_counted(2), stages=(0, 1)
    ),
    "zero_grad, stage 0": _at_step("the number of backwards", _zero_grad, all_step=_counted(2), stages=(0,)),
    "optimizer state cleared": _at_step("without state on rank 1", _no_state, stages=(0, 2, 3)),
    "a parameter popped from its group": _at_step("the place of head.weight", _pop, stages=(0, 2, 3)),
    "parameters in another order": _at_step("the place of embed.weight", _reverse),
    "divide": _at_step("divided", _counted(1, divide=False), all_step=_counted(1)),
    "is_last": _at_step("given by the caller", _counted(1)),
    "evaluation mode": _at_step("training mode", _in_eval_mode),
    "steps taken": _at_step("steps taken before", _loaded),
    "loss scale loaded": _at_step("loss scale", _loaded_scale, base={**FP16, "fp16.initial_scale_power": 4}),
    "a larger batch": Kind(error=None, step=_other_batch, stages=(0, 3)),
}

HARMLESS = {
    "lines printed": Kind(error=None, config={"steps_per_print": 1}),
    "no difference": Kind(error=None, stages=(0, 1, 2, 3)),
}
