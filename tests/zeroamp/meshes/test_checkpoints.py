"""What was trained on a mesh is saved and goes on on another; exports are whole, and the ledger counts the traffic."""

import math
from dataclasses import dataclass

import pytest
import torch

import zeroamp
from tests.models import parallel
from tests.oracles import whole_model
from tests.processes import parallel_training
from tests.processes.parallel_training import ParallelRun, check_close, mesh_of, num_data
from tests.processes.training import config, full_parameters, same_bits

TENSOR = {"dp": 2, "tp": 2}
EXPERTS = {"dp": 2, "ep": 2}
BOUND = 2e-6
"""fp32 has 24 bits. Products of half the length, or tokens, are summed over ranks: the order of additions differs. 16
times the rounding of one addition (1.2e-7)."""


@dataclass(frozen=True, kw_only=True)
class Continued:
    """What one rank saw of a training that goes on from a checkpoint, or past it."""

    saved: dict[str, torch.Tensor]
    """Whole parameters at the checkpoint."""
    reports: list[tuple[float, float]]
    """(loss, norm) of the steps after it."""


def _start(axes, stage, accumulation, experts):
    mesh, cfg = mesh_of(**axes), config(stage, dtype=None, clip=0.5, accumulation=accumulation)
    return mesh, cfg, *parallel_training.start(mesh, cfg, experts=experts)


def _saved(axes, experts, folder):
    """Train a step, save, and train another one."""
    mesh, cfg, model, train = _start(axes, 2, 1, experts)
    reports, gradients = parallel_training.steps(model, train, mesh, cfg, 0, 1)
    zeroamp.save_checkpoint(folder, model, train)
    saved = full_parameters(model)
    first = ParallelRun(
        losses=[report.loss for report in reports],
        norms=[report.grad_norm for report in reports],
        gradients=gradients,
        parameters=saved,
        placements={},
    )
    more, _ = parallel_training.steps(model, train, mesh, cfg, 1, 1)
    return first, num_data(mesh), Continued(saved=saved, reports=[(report.loss, report.grad_norm) for report in more])


def _loaded(axes, experts, folder, data_ranks):
    """Load, and train one step on the samples of `data_ranks` data ranks."""
    ours = math.prod(size for name, size in axes.items() if name != "tp")
    mesh, cfg, model, train = _start(axes, 3, max(1, data_ranks // ours), experts)
    zeroamp.load_checkpoint(folder, model, train)
    saved = full_parameters(model)
    more, _ = parallel_training.steps(model, train, mesh, cfg, 1, 1, max(1, ours // data_ranks))
    return Continued(saved=saved, reports=[(report.loss, report.grad_norm) for report in more])


@pytest.mark.parametrize(
    ("before", "after", "experts"),
    [
        pytest.param(TENSOR, {"dp": 1, "tp": 2}, False, id="tensor axis, half the data ranks", marks=pytest.mark.slow),
        pytest.param(EXPERTS, {"dp": 2}, True, id="expert axis on data ranks"),
        pytest.param({"dp": 4}, EXPERTS, True, id="data ranks on an expert axis", marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_process_and_goes_on_on_other_axes(request, tmp_path, before, after, experts):
    def ranks_of(axes):
        return request.getfixturevalue(f"ranks{math.prod(axes.values())}")

    first, data_ranks, expected = ranks_of(before).run(_saved, before, experts, tmp_path)[0]
    model = parallel.moe_decoder() if experts else parallel.decoder()
    check_close(first, whole_model.train(model, parallel.samples, 1, num_data=data_ranks, clip=0.5), BOUND)
    found = ranks_of(after).run(_loaded, after, experts, tmp_path, data_ranks)[0]
    assert same_bits(found.saved, expected.saved) == []
    assert found.reports[0] == pytest.approx(expected.reports[0], rel=BOUND)


def _resumed_exactly(folder):
    first, _, expected = _saved(TENSOR, False, folder)
    mesh, cfg, model, train = _start(TENSOR, 2, 1, False)
    zeroamp.load_checkpoint(folder, model, train)
    assert same_bits(full_parameters(model), first.parameters) == []
    reports, _ = parallel_training.steps(model, train, mesh, cfg, 1, 1)
    assert [(report.loss, report.grad_norm) for report in reports] == expected.reports


def test_the_same_axes_resume_bit_for_bit(ranks4, tmp_path):
    ranks4.run(_resumed_exactly, tmp_path)


def _exported(axes, experts, folder):
    from safetensors.torch import load_file

    mesh, cfg = mesh_of(**axes), config(3)
    model, train = parallel_training.start(mesh, cfg, experts=experts)
    zeroamp.traffic(model).reset()
    parallel_training.steps(model, train, mesh, cfg, 0, 1)
    planned = {(row["collective"], row["group"]): row["bytes"] for row in zeroamp.explain(model).to_dict()["traffic"]}
    moved = {(str(key.collective), key.group): number for key, number in zeroamp.traffic(model).num_bytes.items()}
    assert planned == moved
    whole = full_parameters(model)
    zeroamp.export_hf(model, folder, dtype="fp32")
    assert same_bits(load_file(folder / "model.safetensors"), whole) == []
    if not experts:
        other, _ = parallel_training.start(mesh, config(2))
        zeroamp.load_hf(other, folder)
        assert same_bits(full_parameters(other), whole) == []


@pytest.mark.parametrize(("axes", "experts"), [(TENSOR, False), (EXPERTS, True)], ids=["tensor", "experts"])
def test_exports_are_whole_and_can_be_loaded(ranks4, tmp_path, axes, experts):
    """Exports are whole and can be loaded and the ledger counts the traffic."""
    pytest.importorskip("safetensors")
    ranks4.run(_exported, axes, experts, tmp_path / "export")
