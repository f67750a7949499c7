"""Data, tensor and context axes together, replicas and a tensor axis: they train, save, and go on as data ranks."""

import pytest
import torch

import zeroamp
from tests.models import parallel
from tests.oracles import whole_model
from tests.processes import parallel_training
from tests.processes.parallel_training import mesh_of
from tests.processes.training import config, full_parameters, same_bits

BOUND = 4e-6
"""fp32 has 24 bits. Products are summed over two ranks, and tokens over two more: twice the bound of each axis."""


def _trained_and_saved(axes, folder):
    mesh, cfg = mesh_of(**axes), config(3, dtype=None, clip=0.5)
    model, train = parallel_training.start(mesh, cfg)
    reports, gradients = parallel_training.steps(model, train, mesh, cfg, 0, 2)
    zeroamp.save_checkpoint(folder, model, train)
    saved = full_parameters(model)
    more, _ = parallel_training.steps(model, train, mesh, cfg, 2, 1)
    return saved, gradients, [(r.loss, r.grad_norm) for r in (*reports, *more)]


def _continued(axes, folder):
    mesh, cfg = mesh_of(**axes), config(3, dtype=None, clip=0.5)
    model, train = parallel_training.start(mesh, cfg)
    zeroamp.load_checkpoint(folder, model, train)
    loaded = full_parameters(model)
    reports, _ = parallel_training.steps(model, train, mesh, cfg, 2, 1)
    return loaded, [(r.loss, r.grad_norm) for r in reports]


def _check(saved, gradients, reports, loaded, continued, num_data):
    oracle = whole_model.train(parallel.decoder(), parallel.samples, 2, num_data=num_data, clip=0.5)
    for fqn, expected in oracle.gradients.items():
        assert torch.linalg.vector_norm(gradients[fqn] - expected) <= BOUND * torch.linalg.vector_norm(expected), fqn
    for step in range(2):
        assert reports[step] == pytest.approx((oracle.losses[step], oracle.norms[step]), rel=BOUND)
    assert same_bits(loaded, saved) == []
    assert continued[0] == pytest.approx(reports[2], rel=BOUND)


@pytest.mark.slow
def test_data_tensor_and_context_axes(ranks8, ranks2, tmp_path):
    axes = {"dp": 2, "cp": 2, "tp": 2}
    saved, gradients, reports = ranks8.run(_trained_and_saved, axes, tmp_path)[0]
    loaded, continued = ranks2.run(_continued, {"dp": 2}, tmp_path)[0]
    _check(saved, gradients, reports, loaded, continued, 2)


def test_replicas_and_a_tensor_axis(ranks4, ranks2, tmp_path):
    axes = {"dp_replicate": 2, "dp_shard": 1, "tp": 2}
    saved, gradients, reports = ranks4.run(_trained_and_saved, axes, tmp_path)[0]
    loaded, continued = ranks2.run(_continued, {"dp": 2}, tmp_path)[0]
    _check(saved, gradients, reports, loaded, continued, 2)


@pytest.mark.slow
def test_replicas_that_shard_and_a_tensor_axis(ranks8, ranks4, tmp_path):
    axes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    saved, gradients, reports = ranks8.run(_trained_and_saved, axes, tmp_path)[0]
    loaded, continued = ranks4.run(_continued, {"dp": 4}, tmp_path)[0]
    _check(saved, gradients, reports, loaded, continued, 4)
