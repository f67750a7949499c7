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


def _continued(axes, folder, shared_by):
    mesh, cfg = mesh_of(**axes), config(3, dtype=None, clip=0.5)
    model, train = parallel_training.start(mesh, cfg)
    zeroamp.load_checkpoint(folder, model, train)
    loaded = full_parameters(model)
    reports, _ = parallel_training.steps(model, train, mesh, cfg, 2, 1, shared_by)
    return loaded, [(r.loss, r.grad_norm) for r in reports]


def _check(saved, gradients, reports, loaded, continued, num_data):
    oracle = whole_model.train(parallel.decoder(), parallel.samples, 2, num_data=num_data, clip=0.5)
    for fqn, expected in oracle.gradients.items():
        assert torch.linalg.vector_norm(gradients[fqn] - expected) <= BOUND * torch.linalg.vector_norm(expected), fqn
    for step in range(2):
        assert reports[step] == pytest.approx((oracle.losses[step], oracle.norms[step]), rel=BOUND)
    assert same_bits(loaded, saved) == []
    assert continued[0] == pytest.approx(reports[2], rel=BOUND)


def _goes_on(request, num_ranks, folder, shared_by):
    """Whole parameters after loading, and the next step, on data ranks alone."""
    return request.getfixturevalue(f"ranks{num_ranks}").run(_continued, {"dp": num_ranks}, folder, shared_by)[0]


@pytest.mark.slow
def test_data_tensor_and_context_axes(request, ranks8, tmp_path):
    axes = {"dp": 2, "cp": 2, "tp": 2}
    saved, gradients, reports = ranks8.run(_trained_and_saved, axes, tmp_path)[0]
    for num_ranks in (2, 4):  # two of four ranks share the samples of one of two
        loaded, continued = _goes_on(request, num_ranks, tmp_path, num_ranks // 2)
        _check(saved, gradients, reports, loaded, continued, 2)


def test_replicas_and_a_tensor_axis(request, ranks4, tmp_path):
    axes = {"dp_replicate": 2, "dp_shard": 1, "tp": 2}
    saved, gradients, reports = ranks4.run(_trained_and_saved, axes, tmp_path)[0]
    loaded, continued = _goes_on(request, 4, tmp_path, 2)
    _check(saved, gradients, reports, loaded, continued, 2)


@pytest.mark.slow
def test_replicas_that_shard_and_a_tensor_axis(request, ranks8, tmp_path):
    axes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    saved, gradients, reports = ranks8.run(_trained_and_saved, axes, tmp_path)[0]
    loaded, continued = _goes_on(request, 4, tmp_path, 1)
    _check(saved, gradients, reports, loaded, continued, 4)
