"""Tensor parallelism: DTensor parameters in typed groups, the norm, checkpoints and exports."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zeroamp
from tests.models import parallel
from tests.oracles import whole_model
from tests.processes import parallel_training
from tests.processes.parallel_training import check_close, fp64_norm, mesh_of, reported
from tests.processes.ranks import RankError
from tests.processes.training import config, full_parameters, same_bits
from tests.selection import slow_but
from zeroamp.policies.errors import StepError

AXES = {"dp": 2, "tp": 2}
BOUND = 2e-6
"""fp32 has 24 bits. A row-wise product is two products of half the length, summed over ranks: the order of additions
differs. 16 times the rounding of one addition (1.2e-7)."""


def _data_axis(mesh):
    return mesh["dp"]


@pytest.mark.parametrize(
    ("tied", "sequence", "passed"),
    [(False, False, _data_axis), pytest.param(True, False, None, marks=pytest.mark.slow), (False, True, None)],
    ids=["llama", "tied", "sequence"],
)
def test_it_equals_one_process(ranks4, tied, sequence, passed):
    oracle = whole_model.train(parallel.decoder(tied=tied), parallel.samples, 2, num_data=2, accumulation=2, clip=0.5)
    cfg = config(3, dtype=None, clip=0.5, accumulation=2)
    options = {"tied": tied, "sequence": sequence}
    runs = ranks4.run(parallel_training.train, AXES, cfg, 2, passed=passed, **options)
    check_close(runs[0], oracle, BOUND)
    for other in runs[1:]:
        assert (other.losses, other.norms) == (runs[0].losses, runs[0].norms)
        assert same_bits(other.parameters, runs[0].parameters) == []
    assert "_StridedShard" in runs[0].placements["blocks.0.attention.q.weight"]


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_own_plan_equals_one_process(ranks4, tied):
    pytest.importorskip("transformers.distributed.tensor_parallel")
    oracle = whole_model.train(parallel.hf_decoder(tied=tied), parallel.samples, 2, num_data=2, clip=0.5)
    run = ranks4.run(parallel_training.train, AXES, config(3, dtype=None, clip=0.5), 2, hf=True, tied=tied)[0]
    check_close(run, oracle, BOUND)
    assert "_StridedShard" in run.placements["lm.model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize("part", ["scaled", "adapted"])
def test_0_d_and_frozen_parameters(ranks4, part):
    oracle = whole_model.train(parallel.decoder(**{part: True}), parallel.samples, 2, num_data=2, clip=0.5)
    runs = ranks4.run(parallel_training.train, AXES, config(3, dtype=None, clip=0.5), 2, **{part: True})
    check_close(runs[0], oracle, BOUND)  # the norm has the gradient of the 0-D parameter, too
    for other in runs[1:]:
        assert same_bits(other.parameters, runs[0].parameters) == []
    if part == "scaled":
        assert float(runs[0].parameters["scale"]) == pytest.approx(float(oracle.parameters["scale"]), rel=1e-5)
    else:
        assert all(".a." in fqn or ".b." in fqn for fqn in runs[0].gradients)
        start = dict(parallel.decoder(adapted=True).named_parameters())
        frozen = {fqn: value for fqn, value in runs[0].parameters.items() if fqn not in runs[0].gradients}
        assert same_bits(frozen, {fqn: start[fqn].detach() for fqn in frozen}) == []


@pytest.mark.parametrize("tied", slow_but([False, True], False))
def test_stages_have_the_same_bits(ranks4, tied):
    runs = {
        stage: ranks4.run(parallel_training.train, AXES, config(stage, clip=0.5), 2, tied=tied)[0]
        for stage in (1, 2, 3)
    }
    for stage in (1, 2):
        assert (runs[stage].losses, runs[stage].norms) == (runs[3].losses, runs[3].norms)
        assert same_bits(runs[stage].gradients, runs[3].gradients) == []
        assert same_bits(runs[stage].parameters, runs[3].parameters) == []
    assert runs[3].norms[0] == reported(fp64_norm(runs[3].gradients))


def test_an_embedding_and_a_head_that_are_units_of_their_own_have_the_same_bits(ranks4):
    """FSDP2 warns of outputs that are views, as those of parallelize_module are. Warnings are errors in ranks."""
    own, in_root = (
        ranks4.run(parallel_training.train, AXES, config(3, dtype=None, clip=0.5, threshold=threshold), 2)[0]
        for threshold in (1000, None)
    )
    assert own.losses == in_root.losses
    assert same_bits(own.parameters, in_root.parameters) == []


def _resumed(axes, folder, saving, accumulation):
    """Train, save and train on; or load and train on. Return whole parameters, then losses and norms."""
    mesh = mesh_of(**axes)
    cfg = config(2 if saving else 3, dtype=None, clip=0.5, accumulation=accumulation)
    model, train = parallel_training.start(mesh, cfg)
    if saving:
        parallel_training.steps(model, train, mesh, cfg, 0, 2)
        zeroamp.save_checkpoint(folder, model, train)
    else:
        zeroamp.load_checkpoint(folder, model, train)
    found = full_parameters(model)
    reports, _ = parallel_training.steps(model, train, mesh, cfg, train.num_steps, 2)
    return found, [report.loss for report in reports], [report.grad_norm for report in reports]


@pytest.mark.parametrize(("axes", "accumulation"), [({"dp": 2}, 1), ({"dp": 1, "tp": 2}, 2)])
def test_a_checkpoint_resumes_on_other_axes(ranks4, ranks2, tmp_path, axes, accumulation):
    saved, losses, norms = ranks4.run(_resumed, AXES, tmp_path, True, 1)[0]
    loaded, ours, our_norms = ranks2.run(_resumed, axes, tmp_path, False, accumulation)[0]
    assert same_bits(loaded, saved) == []
    assert ours == pytest.approx(losses, rel=BOUND)
    assert our_norms == pytest.approx(norms, rel=BOUND)


def _resumed_exactly(folder):
    mesh, cfg = mesh_of(**AXES), config(3, clip=0.5)
    model, train = parallel_training.start(mesh, cfg)
    parallel_training.steps(model, train, mesh, cfg, 0, 1)
    zeroamp.save_checkpoint(folder, model, train)
    reports, _ = parallel_training.steps(model, train, mesh, cfg, 1, 2)
    other, again = parallel_training.start(mesh, cfg)
    zeroamp.load_checkpoint(folder, other, again)
    repeated, _ = parallel_training.steps(other, again, mesh, cfg, 1, 2)
    same = same_bits(full_parameters(model), full_parameters(other))
    return same, [(r.loss, r.grad_norm) for r in reports], [(r.loss, r.grad_norm) for r in repeated]


@pytest.mark.slow
def test_the_same_axes_resume_bit_for_bit(ranks4, tmp_path):
    differing, first, second = ranks4.run(_resumed_exactly, tmp_path)[0]
    assert differing == []
    assert first == second


def _exported(folder):
    from safetensors.torch import load_file

    mesh = mesh_of(**AXES)
    model, train = parallel_training.start(mesh, config(3))
    zeroamp.traffic(model).reset()
    parallel_training.steps(model, train, mesh, config(3), 0, 1)
    planned = {(row["collective"], row["group"]): row["bytes"] for row in zeroamp.explain(model).to_dict()["traffic"]}
    moved = {(str(key.collective), key.group): number for key, number in zeroamp.traffic(model).num_bytes.items()}
    whole = full_parameters(model)
    zeroamp.export_hf(model, folder, dtype="fp32")
    read = load_file(folder / "model.safetensors")
    other, _ = parallel_training.start(mesh, config(2))
    zeroamp.load_hf(other, folder)
    return same_bits(read, whole), same_bits(full_parameters(other), whole), planned, moved


def test_exports_are_whole_and_can_be_loaded_and_the_ledger_counts_the_traffic(ranks4, tmp_path):
    pytest.importorskip("safetensors")
    for exported, loaded, planned, moved in ranks4.run(_exported, tmp_path / "export"):
        assert (exported, loaded) == ([], [])
        assert planned == moved


def _set_whole():
    mesh = mesh_of(**AXES)
    model, _ = parallel_training.start(mesh, config(3))
    named = dict(model.named_parameters())
    values = {
        fqn: torch.randn(p.shape, generator=torch.Generator().manual_seed(dist.get_rank())) for fqn, p in named.items()
    }
    for fqn, parameter in named.items():
        zeroamp.set_full_parameter(parameter, values[fqn])
    return full_parameters(model), values


def test_whole_parameters_can_be_set(ranks4):
    results = ranks4.run(_set_whole)
    for found, _ in results:
        assert same_bits(found, results[0][1]) == []


def _overflowed(axes, overflowing_rank):
    """Five steps in float16; in the third, one element of one rank's gradients is infinite."""
    mesh = mesh_of(**axes)
    cfg = config(3, dtype="float16", clip=0.5) | {"fp16": {"initial_scale_power": 8, "hysteresis": 1}}
    model, train = parallel_training.start(mesh, cfg)
    found = []
    for index in range(5):
        train.backward(model(*parallel_training.inputs_of(mesh, index)))
        if index == 2 and dist.get_rank() == overflowing_rank:
            model.get_parameter("blocks.0.up.weight").grad.to_local().view(-1)[0] = float("inf")
        report = train.step()
        found.append((report.loss, report.skipped, report.loss_scale))
    return found, full_parameters(model)


def test_an_overflow_on_one_tensor_rank_skips_the_step_on_all(ranks4, ranks2):
    runs = ranks4.run(_overflowed, AXES, 1)
    losses, skipped, scales = zip(*runs[0][0], strict=True)
    assert skipped == (False, False, True, False, False)
    assert scales == (256, 256, 256, 128, 128)
    for found, parameters in runs[1:]:
        assert found == runs[0][0]
        assert same_bits(parameters, runs[0][1]) == []
    alone = ranks2.run(_overflowed, {"dp": 2}, 1)[0][0]
    assert losses == pytest.approx([loss for loss, *_ in alone], rel=2**-9)  # activations are rounded to float16


class _HeadNorm(nn.Module):
    """A norm on the heads of one rank, which the plan leaves out."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.norm = nn.RMSNorm(4, eps=1e-5)

    def forward(self, x):
        x = self.up(x)
        return self.norm(x.view(*x.shape[:-1], -1, 4)).flatten(-2).square().mean()


class _HeadScale(nn.Module):
    """A 0-D parameter that scales the heads of one rank."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return (self.up(x) * self.scale).square().mean()


def _part_of_a_gradient(module):
    mesh = mesh_of(**AXES)
    torch.manual_seed(0)
    model = parallelize_module(module(), mesh["tp"], {"up": ColwiseParallel()})
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3, dtype=None)), mesh)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters()))
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    train.backward(model(torch.randn(4, 8, generator=generator)))
    try:
        train.step()
    except StepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("module", "fqn"), [(_HeadNorm, "norm.weight"), (_HeadScale, "scale")])
def test_parts_of_gradients_that_nobody_adds_are_an_error(ranks4, module, fqn):
    for text in ranks4.run(_part_of_a_gradient, module):
        assert "different gradients" in text
        assert fqn in text
        assert "SequenceParallel" in text


def _unsupported_optimizer(how):
    mesh = mesh_of(**AXES)
    model, _ = parallel_training.start(mesh, config(3))
    if how == "verify":
        zeroamp.explain(model).verify(model, parallel.samples(0))
    else:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        zeroamp.TrainStep(model, torch.optim.Muon(matrices))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("muon", "StepError: .*torch's Muon, which is not updated on plain shards.*AdamW"),
        ("verify", "WrapError: Ledger.verify is not supported with tensor"),
    ],
)
def test_what_is_not_built_is_refused(ranks4, how, text):
    with pytest.raises(RankError, match=text):
        ranks4.run(_unsupported_optimizer, how)


def _differing_copies():
    mesh = mesh_of(**AXES)
    model = parallel_training.prepared(mesh)
    if mesh["tp"].get_local_rank() == 1:
        with torch.no_grad():
            model.norm.weight.add_(1e-3)
    zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)), mesh["dp"])


def test_copies_that_differ_over_the_tensor_axis_are_refused(ranks4):
    with pytest.raises(RankError, match=r"WrapError: norm\.weight has values that differ between ranks"):
        ranks4.run(_differing_copies)


def _synced():
    mesh = mesh_of(**AXES)
    model = parallel_training.prepared(mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).fill_(dist.get_rank())
    policy = zeroamp.policy_from_config({**config(3), "zeroamp": {"sync_module_states": True}})
    whole = full_parameters(zeroamp.wrap_model(model, policy, mesh))
    return whole["norm.weight"], whole["blocks.0.up.weight"]


def test_module_states_are_those_of_the_first_ranks_with_the_same_part(ranks4):
    for norm, up in ranks4.run(_synced):
        assert (norm == 0).all()
        first, second = up.chunk(2)
        assert (first == 0).all()
        assert (second == 1).all()
