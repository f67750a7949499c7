"""What every rank runs in the training tests: zeroamp on one of the small models."""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.oracles import two_ranks


def config(stage=3, *, dtype="bfloat16", comm=None, accumulation=1, clip=0.0, threshold=None, **more):
    zero = {"stage": stage}
    if threshold is not None:
        zero["stage3_param_persistence_threshold"] = threshold
    cfg = {
        "zero_optimization": zero,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        **more,
    }
    if dtype is not None:
        cfg["torch_autocast"] = {"enabled": True, "dtype": dtype}
    if comm is not None:
        cfg["communication_data_type"] = comm
    return cfg


KEYS = {
    "hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "leaf_modules": "zero_optimization.leaf_module",
    "max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "offload": "zero_optimization.offload_param",
    "prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
}
"""Attribute of a policy -> its key, where `Policy.replace` would not find it by the attribute's name."""


def policy(cfg, fields=None):
    """The config's policy with other values for some of its attributes."""
    return zeroamp.policy_from_config(cfg).replace(**{KEYS.get(name, name): v for name, v in (fields or {}).items()})


def mesh_of(shape):
    """The mesh of HSDP of (replicas, shards); None of None."""
    return None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def sharded_dims(model):
    """Return {FQN: sharded dimension} of a wrapped model."""
    named = model.named_parameters()
    return {fqn: next(p.dim for p in q.placements if isinstance(p, Shard)) for fqn, q in named}


def wrapped(name, cfg, *, mesh_shape=None, auto_wrap_policy=None, prepare_before=None, fields=None, example=None):
    mesh = mesh_of(mesh_shape)
    model = build(name)
    if prepare_before is not None:
        prepare_before(model)
    if auto_wrap_policy is None and name == "conv":
        auto_wrap_policy = {"Sequential"}
    return zeroamp.wrap_model(model, policy(cfg, fields), mesh, auto_wrap_policy, example_inputs=example)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a training did."""

    losses: list[list[float]]
    """[step][micro-batch], of this rank."""
    norms: list[float]
    """[step], of the step reports."""
    parameters: dict[str, torch.Tensor]
    """Full parameters by FQN, at the end."""
    mean_losses: list[float] | None = None
    """[step], of the step reports."""


def train(
    name, cfg, num_steps, *, mesh_shape=None, lr=1e-2, prepare_before=None, prepare=None, between=None, fields=None,
    make_optimizer=None, example=None, loss_fn=None,
):  # fmt: skip
    """Train a small model on this rank; return its Run.

    prepare_before, prepare: called with the model before and after wrapping. between: after every backward.
    fields: of the policy, beside the config's. make_optimizer: {fqn: parameter} -> the optimizer, in place of AdamW.
    example: inputs for a list of safe modules that is "auto". loss_fn: (`TrainStep`, inputs) -> the loss.
    """
    model = wrapped(name, cfg, mesh_shape=mesh_shape, prepare_before=prepare_before, fields=fields, example=example)
    if prepare is not None:
        prepare(model)
    if make_optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    else:
        optimizer = make_optimizer(dict(model.named_parameters()))
    step = zeroamp.TrainStep(model, optimizer)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    accumulation = cfg["gradient_accumulation_steps"]
    losses, norms, mean_losses = [], [], []
    for index in range(num_steps):
        losses.append([])
        for micro in range(accumulation):
            inputs = batch(name, (index * accumulation + micro) * world_size + rank)
            loss = loss_of(model, inputs) if loss_fn is None else loss_fn(step, inputs)
            losses[-1].append(float(loss.detach()))
            step.backward(loss)
            if between is not None:
                between(model, name)
            report = step.step()
            assert (report is None) == (micro + 1 < accumulation)
        norms.append(report.grad_norm)
        mean_losses.append(report.loss)
    return Run(losses=losses, norms=norms, parameters=full_parameters(model), mean_losses=mean_losses)


class SmallTraining:
    """A small model on this rank, its optimizer and its `TrainStep`, whose calls a test makes one by one."""

    def __init__(self, cfg, make_optimizer=None, make_scheduler=None, *, name="two_blocks", on_shards=False, **more):
        """Wrap the model and build the others.

        make_optimizer: parameters -> the optimizer, or several, in place of SGD. make_scheduler: optimizer -> its
        scheduler. more: arguments of `wrapped`.
        """
        self.name = name
        self.model = wrapped(name, cfg, **more)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(parameters, lr=0.1) if make_optimizer is None else make_optimizer(parameters)
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self.train = zeroamp.TrainStep(self.model, self.optimizer, self.scheduler, on_shards=on_shards)

    def loss(self, index=0):
        """The loss of micro-batch number `index` of this rank."""
        return loss_of(self.model, batch(self.name, index * dist.get_world_size() + dist.get_rank()))

    def backward(self, index=0, factor=1.0, **flags):
        """Run the backward of `factor` times that loss."""
        self.train.backward(self.loss(index) * factor, **flags)

    def step(self, index=0, factor=1.0):
        """Run that backward, and call `step`; return its report."""
        self.backward(index, factor)
        return self.train.step()

    def parameters(self):
        """Full parameters by FQN."""
        return full_parameters(self.model)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def errors_of(actions):
    """Call each of {name: function}; return {name: class and text of the error of zeroamp that it raised, or ""}."""
    texts = {}
    for name, action in actions.items():
        texts[name] = ""
        try:
            action()
        except zeroamp.ZeroAmpError as error:
            texts[name] = f"{type(error).__name__}: {error}"
    return texts


def check_errors(by_rank, patterns):
    """On every rank, the text of each error has its pattern."""
    for texts in by_rank:
        wrong = {name: text for name, text in texts.items() if not re.search(patterns[name], text)}
        assert wrong == {}, wrong
        assert texts.keys() == patterns.keys()


def full_parameters(model):
    return {
        fqn: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu().clone()
        for fqn, p in model.named_parameters()
    }


def same_bits(ours, theirs):
    """The names of the tensors that differ in any bit."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def check_same_run(ours, theirs):
    """The same losses, norms and parameters, bit for bit."""
    assert ours.losses == theirs.losses
    assert ours.norms == theirs.norms
    assert same_bits(ours.parameters, theirs.parameters) == []


def check_runs(by_rank, oracle):
    """Of one run or several on each rank: losses, norms and parameters of `one_process.train`, bit for bit.

    The mean losses of step reports are summed in another order. A module put around a block may be called `block`.
    """
    losses, norms, parameters = oracle
    means = [sum(map(sum, ranks)) / sum(map(len, ranks)) for ranks in losses]
    for rank, runs in enumerate(by_rank):
        for run in runs if isinstance(runs, list) else [runs]:
            ours = {fqn.replace(".block.", "."): parameter for fqn, parameter in run.parameters.items()}
            assert run.losses == [ranks[rank] for ranks in losses]
            assert run.mean_losses is None or run.mean_losses == pytest.approx(means, rel=1e-6)
            assert run.norms == norms
            assert same_bits(ours, parameters) == []


def plain_loop(model, loss_of, num_steps):
    """Train with SGD as `tests.oracles.two_ranks.train` does. Return (losses of this rank, full parameters)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.SGD(trained, lr=two_ranks.LEARNING_RATE), []
    for step in range(num_steps):
        loss = loss_of(model, step * two_ranks.NUM_RANKS + dist.get_rank())
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_parameters(model)


def on_fsdp2_alone(model):
    """Shard a model whose blocks are `model.blocks` with FSDP2, and return it."""
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model
