"""`unwrap_model`: the model is what it was before `wrap_model`, with the trained weights; what cannot go on raises."""

import copy
import gc
import io
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zeroamp
import zeroamp.deepspeed
from tests.models.small import MORE_MODELS, Llama, batch, build, loss_of
from tests.processes.training import (
    SmallTraining,
    adamw,
    check_errors,
    config,
    errors_of,
    full_parameters,
    mesh_of,
    same_bits,
    wrapped,
)


class Scaled(Llama):
    """Tied, with a 0-D parameter, a buffer, a frozen bf16 norm, and a parameter with two names in one module."""

    def __init__(self):
        super().__init__(tied=True, num_blocks=2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.tensor([0.5]), persistent=False)
        self.norm.twin = self.norm.weight
        self.blocks[0].norm1.to(torch.bfloat16).requires_grad_(False)

    def forward(self, tokens):
        return super().forward(tokens) * self.scale + self.offset.sum()


MORE_MODELS["scaled_llama"] = Scaled


def _hook(*_args):
    """A hook of the user, of any kind."""


def _checkpoint_blocks(model):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def _compile_a_block(model):
    model.blocks[0].compile(backend="eager")


def _entries(module):
    """The module's entries: (name, object), and (name, key) for dicts, such as those of hooks."""
    for name, value in vars(module).items():
        if isinstance(value, dict):
            yield from ((name, key) for key in value)
        yield name, id(value)


def _snapshot(model):
    """What a model is made of, besides the values and dtypes of its parameters."""
    modules = {fqn: (id(module), type(module), list(_entries(module))) for fqn, module in model.named_modules()}
    by_id = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append((fqn, parameter.shape, type(parameter), parameter.requires_grad))
    return modules, list(by_id.values()), {fqn: id(buffer) for fqn, buffer in model.named_buffers()}


class There:
    """A model that was wrapped, and trained for a step."""

    def __init__(self, name, cfg, prepare=None, **options):
        def note(model):
            if prepare is not None:
                prepare(model)
            model.register_forward_hook(_hook)
            model.forward = model.forward  # on the instance, as some libraries set it
            self.before = _snapshot(model)
            self.dtypes = {fqn: parameter.dtype for fqn, parameter in model.named_parameters()}

        self.name = name
        self.training = SmallTraining(cfg, name=name, prepare_before=note, **options)
        self.model = self.training.model
        self.added = [self.model.register_forward_hook(_hook), self.model.register_state_dict_pre_hook(_hook)]
        for _ in range(2):
            zeroamp.register_forward_method(self.model, "extra_repr")
        self.training.step(0)
        self.model.state_dict()
        self.weights = full_parameters(self.model)
        self.model(batch(name, 0))  # leaves units unsharded
        for parameter in self.model.parameters():
            parameter.grad = None if parameter.dim() else torch.ones(())  # those of others are of the shards


def _there_and_back(name, cfg, prepare=None, *, mesh_shape=None):
    there = There(name, cfg, prepare, mesh_shape=mesh_shape)
    model = zeroamp.unwrap_model(there.model)
    assert model is there.model
    for handle in there.added:
        assert handle.id in handle.hooks_dict_ref()
        handle.remove()
    assert _snapshot(model) == there.before
    assert all(type(parameter.data) is torch.Tensor and parameter.grad is None for parameter in model.parameters())
    for fqn, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else there.dtypes[fqn])
    assert same_bits(full_parameters(model), there.weights) == []

    plain = build(name)
    if prepare is not None:
        prepare(plain)
    plain.load_state_dict(model.state_dict())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    inputs = batch(name, 5)
    same = (plain, model, copy.deepcopy(model), torch.load(file, weights_only=False))
    losses = [loss_of(each, inputs).item() for each in same]
    assert losses == losses[:1] * 4

    policy = {"Sequential"} if name == "conv" else None
    zeroamp.wrap_model(model, cfg, mesh_of(mesh_shape), policy)
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train.backward(loss_of(model, batch(name, dist.get_world_size() + dist.get_rank())))
    report = train.step()
    through = SmallTraining(cfg, name=name, prepare_before=prepare, mesh_shape=mesh_shape)
    through.step(0)
    assert (report.loss, report.grad_norm) == ((last := through.step(1)).loss, last.grad_norm)
    assert same_bits(full_parameters(model), full_parameters(through.model)) == []


KEPT = {"data_types": {"keep_in_fp32_modules": ["encoder.layers.1"]}}


@pytest.mark.parametrize(
    ("name", "cfg", "prepare", "mesh_shape"),
    [
        ("two_blocks", config(3), _checkpoint_blocks, None),
        ("two_blocks", config(2), None, (2, 1)),
        ("scaled_llama", config(3, threshold=0), None, (1, 2)),
        ("conv", config(0), None, None),
        ("encoder", config(3, dtype=None, bf16={"enabled": True}, **KEPT), None, None),
        ("odd_rows", config(3), None, None),
        ("two_blocks_untied", config(3), _compile_a_block, None),
    ],
    ids=["checkpointed", "HSDP 2x1", "0-D, HSDP 1x2", "conv", "bf16", "other dims", "compiled"],
)
def test_the_model_is_what_it_was_and_trains_on(ranks2, name, cfg, prepare, mesh_shape):
    """Classes, entries, hooks, ties and weights are back. Copies and files work. A second wrap has the same bits.

    A hook that the user has added is still there.
    """
    ranks2.run(_there_and_back, name, cfg, prepare, mesh_shape=mesh_shape)


def _unwrapped():
    """A model that was unwrapped, a reference to one of its shards, and the errors of what was built for it."""
    there = There("two_blocks", config(3))
    model, train, optimizer = there.model, there.training.train, there.training.optimizer
    loss = there.training.loss(1)
    shard = weakref.ref(next(model.parameters()))
    engine = zeroamp.deepspeed.initialize(model=build("two_blocks"), optimizer=adamw, config=config(2))[0]
    zeroamp.unwrap_model(model)
    module = zeroamp.unwrap_model(engine.module)
    texts = errors_of(
        {
            "backward": lambda: train.backward(there.training.loss(1)),
            "step": train.step,
            "zero_grad": train.zero_grad,
            "optimizer": optimizer.step,
            "earlier forward": loss.backward,
            "explain": lambda: zeroamp.explain(model),
            "engine.backward": lambda: engine.backward(module(batch("two_blocks", 0))),
            "engine.step": engine.step,
            "engine.zero_grad": engine.zero_grad,
            "again": lambda: zeroamp.unwrap_model(model),
        }
    )
    assert same_bits(full_parameters(model), there.weights) == []
    assert "state_dict" not in vars(module)
    return model, shard, texts


def _used_after():
    _model, shard, texts = _unwrapped()
    gc.collect()
    assert shard() is None
    return texts


def test_what_was_built_for_the_wrapped_model_raises(ranks2):
    names = ["backward", "step", "zero_grad", "optimizer", "earlier forward", "explain", "again"]
    names += ["engine.backward", "engine.step", "engine.zero_grad"]
    check_errors(ranks2.run(_used_after), dict.fromkeys(names, "unwrap_model"))


def _inside(register, run):
    """Call unwrap_model in a hook, which `register` registers, while `run` runs."""
    handle = register(lambda *_: zeroamp.unwrap_model(_inside.model))
    try:
        run()
    finally:
        handle.remove()


def _tensor_parallel():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh["tp"], {"0": ColwiseParallel()})
    return zeroamp.wrap_model(model, config(3), mesh["dp"])


def _quantized():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].quant_state = "of a Linear4bit of bitsandbytes"
    return zeroamp.wrap_model(model, config(3))


def _refused():
    training = SmallTraining(config(3, accumulation=2), name="two_blocks")
    model, train = training.model, training.train
    unwrap = partial(zeroamp.unwrap_model, model)
    _inside.model = model

    def open_step():
        training.backward()
        train.step()
        try:
            unwrap()
        finally:
            training.backward()
            train.step()

    def asleep(*parts):
        zeroamp.sleep(model, training.optimizer, parts)
        try:
            unwrap()
        finally:
            zeroamp.wake(model)

    def read():
        items = zeroamp.iter_weights(model)
        next(items)
        try:
            unwrap()
        finally:
            items.close()

    def set_again():
        before = model.blocks[0].unshard
        model.blocks[0].unshard = before.__wrapped__
        try:
            unwrap()
        finally:
            model.blocks[0].unshard = before

    def on_one_rank():
        if dist.get_rank() == 0:
            _inside(model.norm.register_forward_hook, lambda: model(batch("two_blocks", 0)))
        else:
            unwrap()

    def on_meta():
        with torch.device("meta"):
            late = nn.Linear(8, 8)
        zeroamp.unwrap_model(zeroamp.wrap_model(late, config(3), materialize=False))

    other = wrapped("conv", config(2))
    texts = errors_of(
        {
            "plain": lambda: zeroamp.unwrap_model(build("conv")),
            "forward": lambda: _inside(model.norm.register_forward_hook, lambda: model(batch("two_blocks", 0))),
            "open step": open_step,
            "params asleep": lambda: asleep("params"),
            "optimizer asleep": lambda: asleep("optimizer"),
            "being read": read,
            "set again": set_again,
            "other models": lambda: zeroamp.unwrap_model(other if dist.get_rank() else model),
            "meta": on_meta,
            "tensor axis": lambda: zeroamp.unwrap_model(_tensor_parallel()),
            "quantized": lambda: zeroamp.unwrap_model(_quantized()),
        }
    )
    training.backward()
    train.step()
    training.backward(1)
    train.step()
    zeroamp.unwrap_model(model)
    return texts


def test_a_model_that_cannot_be_unwrapped_now_says_why(ranks2):
    check_errors(
        ranks2.run(_refused),
        {
            "plain": "WrapError: .*is not wrapped. Call zeroamp.wrap_model",
            "forward": "StepError: unwrap_model was called inside a forward or a backward",
            "open step": "StepError: unwrap_model was called after 1 micro-batch.* of an optimizer step",
            "params asleep": "WrapError: .*is asleep: its params are in host memory. Call zeroamp.wake",
            "optimizer asleep": "WrapError: unwrap_model was called while .*zeroamp.wake",
            "being read": "WrapError: .*is being read by iter_weights",
            "set again": "WrapError: unwrap_model was called, but unshard of blocks.0 was set after wrap_model",
            "other models": "WrapError: unwrap_model differs between ranks: the model is FSDPLlama on rank 0, but FSDP",
            "meta": "WrapError: unwrap_model was called, but weight is on the meta device",
            "tensor axis": "WrapError: unwrap_model was called, but the mesh .tp 2. has a tensor or expert axis",
            "quantized": "WrapError: unwrap_model was called, but 0.weight is quantized",
        },
    )
