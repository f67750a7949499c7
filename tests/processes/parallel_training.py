"""What every rank runs in the tests of context, tensor and expert parallelism."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from tests.models import parallel
from tests.processes.ring_attention import parts_of_sequences
from tests.processes.training import full_parameters


@dataclass(frozen=True, kw_only=True)
class ParallelRun:
    """What one rank saw."""

    losses: list[float]
    """[step], of the step reports."""
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    """Whole, of the first step, before clipping."""
    parameters: dict[str, torch.Tensor]
    """Whole, at the end."""
    placements: dict[str, str]


def mesh_of(**sizes):
    """A named mesh of the axes that are given, such as dp=2, tp=2."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def size_of(mesh, name):
    return mesh[name].size() if name in mesh.mesh_dim_names else 1


def data_rank(mesh):
    """This rank's number among those with different samples, in the order of the axes."""
    rank = 0
    for name in mesh.mesh_dim_names:
        if name not in ("cp", "tp", "pp"):
            rank = rank * mesh[name].size() + mesh[name].get_local_rank()
    return rank


def num_data(mesh):
    return mesh.size() // size_of(mesh, "cp") // size_of(mesh, "tp")


def prepared(mesh, *, tied=False, sequence=False, experts=False, hf=False, ring=False, **parts):
    """A Decoder that is parallelized over the mesh's axes, as a user would do it. `parts`: of a Decoder.

    On a context axis it exchanges heads for tokens (Ulysses). With `ring` it has no exchange of its own: torch's
    `context_parallel` replaces the attention.
    """
    if experts and hf:
        model = parallel.hf_decoder(experts=True)
        return parallel.hf_expert_parallel(model, mesh) if size_of(mesh, "ep") > 1 else model
    if experts:
        model = parallel.moe_decoder(parallel.group_of(mesh["ep"]) if size_of(mesh, "ep") > 1 else None)
        return parallel.expert_parallel(model, mesh["ep"]) if size_of(mesh, "ep") > 1 else model
    if hf:
        model = parallel.hf_decoder(tied=tied)
        return parallel.hf_tensor_parallel(model, mesh["tp"]) if size_of(mesh, "tp") > 1 else model
    context = mesh["cp"].get_group() if size_of(mesh, "cp") > 1 and not ring else None
    model = parallel.decoder(tied=tied, context=context, **parts)
    if size_of(mesh, "tp") > 1:
        parallel.tensor_parallel(model, mesh["tp"], tied=tied, sequence=sequence)
    return model


def inputs_of(mesh, index, shared_by=1, *, ring=False):
    """This rank's part of the samples of its data rank in a micro-batch, with `ring` whole sequences.

    `shared_by`: so many ranks share the samples.
    """
    number, place = divmod(data_rank(mesh), shared_by)
    samples = parallel.samples(index * (num_data(mesh) // shared_by) + number)
    samples = tuple(each.chunk(shared_by)[place] for each in samples)
    size = size_of(mesh, "cp")
    return parallel.part_of(samples, mesh["cp"].get_local_rank(), size) if size > 1 and not ring else samples


def start(mesh, cfg, *, passed=None, fields=None, **options):
    """Return a wrapped model and its training step."""
    policy = zeroamp.policy_from_config(cfg, world_size=num_data(mesh))
    model = zeroamp.wrap_model(prepared(mesh, **options), policy, mesh if passed is None else passed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    return model, zeroamp.TrainStep(model, optimizer)


def steps(model, train, mesh, cfg, first, count, shared_by=1, *, ring=False):
    """Run optimizer steps; return their reports, and the whole gradients of the first.

    The samples of a step are the same on N data ranks with k micro-batches and on N k data ranks with one. `shared_by`:
    each two (four ...) ranks share the samples of one, so that twice as many ranks have the same samples in a step.
    """
    accumulation = cfg.get("gradient_accumulation_steps", 1)
    reports, gradients = [], {}
    for step in range(first, first + count):
        for micro in range(accumulation):
            inputs = inputs_of(mesh, step * accumulation + micro, shared_by, ring=ring)
            with parts_of_sequences(mesh["cp"], inputs) if ring else contextlib.nullcontext(inputs) as inputs:
                train.backward(model(*inputs))
            is_last = micro + 1 == accumulation
            if is_last and step == first:
                gradients = _whole_gradients(model)
            report = train.step()
        reports.append(report)
    return reports, gradients


def _whole_gradients(model):
    """Those of 0-D parameters are left out: the step averages them."""
    named = {fqn: parameter for fqn, parameter in model.named_parameters() if parameter.dim() > 0}
    found = {fqn: zeroamp.full_gradient(parameter) for fqn, parameter in named.items()}
    return {fqn: gradient.cpu() for fqn, gradient in found.items() if gradient is not None}


def train(axes, cfg, num_steps, *, passed=None, ring=False, **options):
    """Train a Decoder on a mesh of `axes`; return this rank's ParallelRun. `passed`: the slice that wrap_model gets."""
    mesh = mesh_of(**axes)
    given = mesh if passed is None else passed(mesh)
    model, step = start(mesh, cfg, passed=given, ring=ring, **options)
    reports, gradients = steps(model, step, mesh, cfg, 0, num_steps, ring=ring)
    return ParallelRun(
        losses=[report.loss for report in reports],
        norms=[report.grad_norm for report in reports],
        gradients=gradients,
        parameters=full_parameters(model),
        placements={fqn: str(getattr(p, "placements", None)) for fqn, p in model.named_parameters()},
    )


def check_close(run, oracle, bound):
    """Losses, norms and gradients within a relative bound, each gradient by the norm of its difference."""
    differences = {
        fqn: float(torch.linalg.vector_norm(run.gradients[fqn] - expected) / torch.linalg.vector_norm(expected))
        for fqn, expected in oracle.gradients.items()
        if expected.dim() > 0
    }
    assert {fqn: each for fqn, each in differences.items() if each > bound} == {}
    assert run.losses == pytest.approx(oracle.losses, rel=bound)
    assert run.norms == pytest.approx(oracle.norms, rel=bound)


def fp64_norm(tensors):
    """The norm of whole tensors, summed in fp64."""
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors.values()]).sum().sqrt())


def reported(norm):
    """A norm as step reports have it: in fp32."""
    return float(torch.tensor(norm, dtype=torch.float32))
