"""Expert parallelism: experts distributed over an axis, and FSDP2 over the other data ranks; groups on two meshes."""

import math

import pytest

import zeroamp
from tests.models import parallel
from tests.oracles import whole_model
from tests.processes import parallel_training
from tests.processes.parallel_training import check_close, fp64_norm, mesh_of, reported
from tests.processes.ranks import RankError
from tests.processes.training import config, full_parameters, same_bits

AXES = {"dp": 2, "ep": 2}
BOUND = 2e-6
"""fp32 has 24 bits. Experts multiply the tokens of all ranks at once: the order of additions over tokens differs. 16
times the rounding of one addition (1.2e-7)."""


def test_transformers_own_plan_equals_one_process(ranks4):
    pytest.importorskip("transformers.distributed.expert_parallel")
    oracle = whole_model.train(parallel.hf_moe_decoder(), parallel.samples, 2, num_data=4, clip=0.5)
    axes, cfg = {**AXES, "tp": 1}, config(3, dtype=None, clip=0.5)
    run = ranks4.run(parallel_training.train, axes, cfg, 2, experts=True, hf=True)[0]
    check_close(run, oracle, BOUND)
    assert "_StridedShard" in run.placements["lm.model.layers.0.mlp.experts.down_proj"]


def test_it_equals_one_process(ranks4):
    oracle = whole_model.train(parallel.moe_decoder(), parallel.samples, 2, num_data=4, accumulation=2, clip=0.5)
    cfg = config(3, dtype=None, clip=0.5, accumulation=2)
    runs = ranks4.run(parallel_training.train, AXES, cfg, 2, experts=True)
    check_close(runs[0], oracle, BOUND)
    assert "_StridedShard" in runs[0].placements["blocks.0.experts.up"]
    for other in runs[1:]:
        assert (other.losses, other.norms) == (runs[0].losses, runs[0].norms)
        assert same_bits(other.parameters, runs[0].parameters) == []


def test_stages_have_the_same_bits(ranks4):
    runs = {
        stage: ranks4.run(parallel_training.train, AXES, config(stage, clip=0.5), 2, experts=True)[0]
        for stage in (1, 2, 3)
    }
    for stage in (1, 2):
        assert (runs[stage].losses, runs[stage].norms) == (runs[3].losses, runs[3].norms)
        assert same_bits(runs[stage].parameters, runs[3].parameters) == []
    assert runs[3].norms[0] == reported(fp64_norm(runs[3].gradients))


def _resumed(axes, folder, saving, accumulation=1):
    """Train and save, or load; then train on. Return whole parameters, then losses and norms."""
    mesh, cfg = mesh_of(**axes), config(3, dtype=None, clip=0.5, accumulation=accumulation)
    model, train = parallel_training.start(mesh, cfg, experts=True)
    if saving:
        parallel_training.steps(model, train, mesh, cfg, 0, 1)
        zeroamp.save_checkpoint(folder, model, train)
    else:
        zeroamp.load_checkpoint(folder, model, train)
    found = full_parameters(model)
    reports, _ = parallel_training.steps(model, train, mesh, cfg, 1, 2)
    return found, [report.loss for report in reports], [report.grad_norm for report in reports]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (AXES, {"dp": 4}),
        (AXES, {"dp": 2}),
        (AXES, {"dp": 1, "ep": 2}),
        ({"dp": 4}, AXES),
    ],
    ids=["dp4", "dp2", "ep2", "into experts"],
)
def test_a_checkpoint_resumes_on_other_axes(request, ranks4, tmp_path, before, after):
    num_ranks = math.prod(after.values())
    saved, losses, norms = ranks4.run(_resumed, before, tmp_path, True)[0]
    ranks = request.getfixturevalue(f"ranks{num_ranks}")
    loaded, ours, our_norms = ranks.run(_resumed, after, tmp_path, False, 4 // num_ranks)[0]  # the same samples
    assert same_bits(loaded, saved) == []
    assert ours == pytest.approx(losses, rel=BOUND)
    assert our_norms == pytest.approx(norms, rel=BOUND)


def _exported(folder):
    from safetensors.torch import load_file

    mesh = mesh_of(**AXES)
    model, train = parallel_training.start(mesh, config(3), experts=True)
    zeroamp.traffic(model).reset()
    parallel_training.steps(model, train, mesh, config(3), 0, 1)
    ledger, counted = zeroamp.explain(model), zeroamp.traffic(model)
    planned = {(row["collective"], row["group"]): row["bytes"] for row in ledger.to_dict()["traffic"]}
    moved = {(str(key.collective), key.group): number for key, number in counted.num_bytes.items()}
    whole = full_parameters(model)
    zeroamp.export_hf(model, folder, dtype="fp32")
    return same_bits(load_file(folder / "model.safetensors"), whole), planned, moved


def test_an_export_is_whole_and_the_ledger_counts_the_traffic(ranks4, tmp_path):
    pytest.importorskip("safetensors")
    differing, planned, moved = ranks4.run(_exported, tmp_path / "export")[0]
    assert differing == []
    assert planned == moved


def _without_the_axis():
    mesh = mesh_of(**AXES)
    zeroamp.wrap_model(
        parallel_training.prepared(mesh, experts=True), zeroamp.policy_from_config(config(3)), mesh["dp"]
    )


def test_a_slice_without_the_expert_axis_is_refused(ranks4):
    with pytest.raises(RankError, match="WrapError: .*the axis 'ep' of 2 ranks, which is not in it"):
        ranks4.run(_without_the_axis)
