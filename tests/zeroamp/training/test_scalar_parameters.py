"""0-D parameters: replicated on every rank, reduced in the step's all-reduce, saved and exported in their own shape."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.processes.ranks import RankError
from tests.processes.training import check_run, config, full_parameters, policy, same_bits, train
from tests.selection import slow_but
from zeroamp.planning.plan import build_plan

NUM_STEPS = 4
CLIP = 0.05  # low enough that every step clips


def scalar(model):
    """One 0-D parameter at the root, one that two units own, a frozen one, one in bf16, and one that is never used."""
    model.scale = nn.Parameter(torch.tensor(0.5))
    model.temperature = nn.Parameter(torch.tensor(1.25), requires_grad=False)
    model.unused = nn.Parameter(torch.tensor(3.0))
    for stage in model.stages:
        stage.register_forward_hook(_scaled)
        stage.gain = model.stages[0].gain if stage is not model.stages[0] else nn.Parameter(torch.tensor(1.5))


def _scaled(stage, _args, output):
    return output * stage.gain


def _runs(stages, options, mesh_shape=None):
    return {
        stage: train(
            "conv", config(stage, clip=CLIP, **options), NUM_STEPS, prepare_before=scalar, mesh_shape=mesh_shape
        )
        for stage in stages
    }


def _without_unused(run_or_oracle):
    """The oracle gives zeros to an unused parameter, which weight decay then moves; here it has no gradient."""
    run_or_oracle.pop("unused")


@pytest.mark.parametrize("options", slow_but([{}, {"dtype": None}, {"accumulation": 1, "comm": "fp32"}], {}), ids=str)
def test_all_stages_equal_one_process(ranks2, options):
    autocast = None if "dtype" in options else torch.bfloat16
    oracle = one_process.train("conv", world_size=2, num_steps=NUM_STEPS, clip=CLIP, prepare=scalar, autocast=autocast)
    assert oracle[2]["scale"] != 0.5
    assert oracle[2]["stages.0.gain"] != 1.5
    _without_unused(oracle[2])
    for rank, by_stage in enumerate(ranks2.run(_runs, (0, 1, 2, 3), options)):
        for run in by_stage.values():
            assert run.parameters.pop("unused") == 3.0
            check_run(run, rank, oracle)


def test_micro_batches_are_summed_before_ranks(ranks2):
    oracle = one_process.train("conv", world_size=2, num_steps=NUM_STEPS, clip=CLIP, prepare=scalar, accumulation=4)
    _without_unused(oracle[2])
    for rank, by_stage in enumerate(ranks2.run(_runs, (0, 1), {"accumulation": 4, "comm": "fp32"})):
        for run in by_stage.values():
            run.parameters.pop("unused")
            check_run(run, rank, oracle)


def test_replicas_and_shards_count_once_in_the_norm(ranks4):
    oracle = one_process.train("conv", world_size=4, num_steps=NUM_STEPS, clip=CLIP, prepare=scalar, num_replicas=2)
    for by_stage in ranks4.run(_runs, (3,), {}, (2, 2)):
        for name in ("scale", "stages.0.gain"):
            torch.testing.assert_close(by_stage[3].parameters[name], oracle[2][name])
        assert by_stage[3].norms == pytest.approx(oracle[1], rel=1e-5)


def _float16():
    cfg = config(3, dtype="float16", clip=CLIP, fp16={"loss_scale": 4})
    return train("conv", cfg, NUM_STEPS, prepare_before=scalar)


def test_a_loss_scale_is_taken_out(ranks2):
    oracle = one_process.train(
        "conv", world_size=2, num_steps=NUM_STEPS, clip=CLIP, prepare=scalar, autocast=torch.float16, loss_scale=4.0
    )
    _without_unused(oracle[2])
    for rank, run in enumerate(ranks2.run(_float16)):
        run.parameters.pop("unused")
        check_run(run, rank, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["clip", "siglip"], "clip"))
def test_contrastive_models_of_transformers_equal_one_process(ranks2, tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="the models are transformers'")
    oracle = one_process.train(name, world_size=2, num_steps=NUM_STEPS, clip=CLIP)
    for rank, by_stage in enumerate(ranks2.run(_contrastive, name, (0, 2, 3), tmp_path)):
        for run in by_stage.values():
            check_run(run, rank, oracle)
    for stage in (0, 2, 3):
        loaded = transformers.AutoModel.from_pretrained(tmp_path / str(stage), dtype=torch.float32)
        assert loaded.logit_scale.shape == build(name).logit_scale.shape == (() if name == "clip" else (1,))
        assert same_bits(dict(loaded.named_parameters()), oracle[2]) == []


def _contrastive(name, stages, folder):
    def export(model):
        models.append(model)

    models, runs = [], {}
    # A unit returns a view, which nothing changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for stage in stages:
        runs[stage] = train(name, config(stage, clip=CLIP), NUM_STEPS, prepare=export)
        zeroamp.export_hf(models[-1], folder / str(stage), "fp32")
    return runs


def _used_by_one_rank():
    model = build("conv")
    scalar(model)
    model = zeroamp.wrap_model(model, policy(config(3)))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loss = loss_of(model, batch("conv", 0))
    step.backward(loss + model.unused * 3.0 if dist.get_rank() == 1 else loss)
    step.clip_grad_norm()
    gradient = model.unused.grad
    step.update()
    return gradient, model.unused.detach().clone(), model.temperature.grad


def test_a_rank_that_did_not_use_it_gets_the_mean(ranks2):
    for gradient, after, of_frozen in ranks2.run(_used_by_one_rank):
        assert gradient == 1.5
        assert after == 1.5
        assert of_frozen is None


def _plain_backward():
    model = build("conv")
    scalar(model)
    model = zeroamp.wrap_model(model, policy(config(3)))
    loss_of(model, batch("conv", 0)).backward()


def test_a_backward_without_a_train_step_is_refused(ranks2):
    with pytest.raises(RankError, match="StepError: .*the model has the 0-D parameter scale.*TrainStep"):
        ranks2.run(_plain_backward)


class _Foreach(torch.optim.AdamW):
    """Of another class than AdamW, so that it always steps on DTensors, and by foreach kernels."""

    def __init__(self, params):
        super().__init__(params, lr=1e-2, foreach=True)


def _optimizers(make):
    model = build("conv")
    scalar(model)
    model = zeroamp.wrap_model(model, policy(config(3)))
    optimizer = make(model.parameters())
    groups = [dict(group) for group in optimizer.param_groups]
    step = zeroamp.TrainStep(model, optimizer)
    for index in range(2):
        step.backward(loss_of(model, batch("conv", 2 * index + dist.get_rank())))
        step.step()
    assert [group["params"] for group in optimizer.param_groups] == [group["params"] for group in groups]
    return full_parameters(model)


def _adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def test_foreach_optimizers_step_both_kinds(ranks2):
    ours, theirs = ranks2.run(_optimizers, _Foreach)[0], ranks2.run(_optimizers, _adamw)[0]
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


def _wrapped(stage, mesh_shape=None, seed=0, meta=False):
    with torch.device("meta" if meta else "cpu"):
        model = build("conv", seed)
        scalar(model)
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    return zeroamp.wrap_model(model, policy(config(stage)), mesh, {"Sequential"})


def _training(stage, seed=0, mesh_shape=None):
    model = _wrapped(stage, mesh_shape, seed)
    return zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def _advance(step, start, stop):
    for index in range(start, stop):
        step.backward(loss_of(step.model, batch("conv", 2 * index + dist.get_rank() % 2)))
        step.step()
    return full_parameters(step.model)


def _saved(folder):
    step = _training(3)
    _advance(step, 0, 2)
    zeroamp.save_checkpoint(folder, step.model, step)
    return full_parameters(step.model), _advance(step, 2, 4)


def _loaded(folder, stage, mesh_shape=None):
    step = _training(stage, seed=5, mesh_shape=mesh_shape)
    zeroamp.load_checkpoint(folder, step.model, step)
    return full_parameters(step.model), _advance(step, 2, 4)


@pytest.mark.parametrize("stage", slow_but([0, 3], 3))
def test_a_run_goes_on_from_a_checkpoint(ranks2, tmp_path, stage):
    saved, expected = ranks2.run(_saved, tmp_path)[0]
    for loaded, after in ranks2.run(_loaded, tmp_path, stage):
        assert loaded["scale"].shape == ()
        assert same_bits(loaded, saved) == []
        assert same_bits(after, expected) == []


def test_a_checkpoint_is_loaded_by_more_ranks(ranks2, ranks4, tmp_path):
    saved, _ = ranks2.run(_saved, tmp_path / "saved")[0]
    for loaded, _ in ranks4.run(_loaded, tmp_path / "saved", 2, (2, 2)):
        assert same_bits(loaded, saved) == []


def _from_files(folder):
    model = _wrapped(3)
    zeroamp.export_hf(model, folder)
    before = full_parameters(model)
    other = _wrapped(0, seed=9)
    with torch.no_grad():
        other.scale.zero_()
    zeroamp.load_hf(other, folder)
    return before, full_parameters(other)


def test_files_have_its_own_shape(ranks2, tmp_path):
    for before, loaded in ranks2.run(_from_files, tmp_path):
        assert before["scale"].shape == ()
        assert same_bits(loaded, before) == []


class WithReset(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.gain = nn.Parameter(torch.empty((), dtype=torch.bfloat16, device=self.weight.device))
        self.reset_gain()

    def reset_gain(self):
        nn.init.normal_(self.gain)

    def reset_parameters(self):
        super().reset_parameters()
        if hasattr(self, "gain"):
            self.reset_gain()

    def forward(self, x):
        return super().forward(x) * self.gain


def _meta():
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = nn.Sequential(WithReset(), WithReset())
    model = zeroamp.wrap_model(model, policy(config(3)))
    return [(p.shape, p.dtype, p.device.type, p.detach().clone()) for p in (model[0].gain, model[1].gain)]


def test_meta_models_get_the_same_values_on_all_ranks(ranks2):
    first, second = ranks2.run(_meta)
    assert first == second
    assert all(part[:3] == ((), torch.float32, "cpu") for part in first)
    assert first[0] != first[1]


def _ledger():
    model = _wrapped(2)
    ledger = zeroamp.explain(model)
    verification = ledger.verify(model, batch("conv", 0))
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters()))
    step.backward(loss_of(model, batch("conv", 0)))
    traffic = zeroamp.traffic(model)
    traffic.reset()
    step.step()
    (key,) = [key for key in traffic.num_bytes if key.group == "step"]
    return ledger.to_dict(), str(ledger), str(verification), traffic.num_bytes[key]


def test_the_ledger_lists_and_verifies_it(ranks2):
    ledger, text, verification, num_bytes = ranks2.run(_ledger)[0]
    rows = {row["parameter"]: row for row in ledger["parameters"]}
    row = rows["scale"]
    assert row["shape"] == []
    assert (row["group"], row["stored"], row["param"], row["compute"]) == ("replicated", "fp32", "fp32", "per op")
    assert (row["gradient"], row["communication"], row["accumulate"], row["optimizer"]) == (
        "fp32",
        "fp64",
        "fp32",
        "fp32",
    )
    assert (row["stored_bytes_per_rank"], row["unsharded_bytes_per_rank"], row["gradient_bytes_per_rank"]) == (4, 0, 4)
    assert rows["temperature"]["gradient"] is None
    assert rows["stages.0.gain"]["aliases"] == ["stages.1.gain"]
    assert "replicated" in text
    assert "replicated" in verification
    planned = [row["bytes"] for row in ledger["traffic"] if row["group"] == "step"]
    # Loss, norm, a hash, one number for three sharded parameters, and two for each 0-D one.
    num_sharded = len(list(build("conv").parameters()))
    assert planned == [num_bytes] == [(3 + -(-num_sharded // 3) + 2 * 4) * 8]


def test_the_dry_run_counts_it():
    def plan_of(prepare):
        model = build("conv")
        prepare(model)
        run = zeroamp.plan_run(
            model, policy(config(3)), world_size=2, batch=2, stages=(3,), auto_wrap_policy={"Sequential"},
            inputs=lambda size, seq: (torch.zeros(size, 3, 6, 6),),
        )  # fmt: skip
        return run.to_dict()["stages"][0]["memory"]["peak"]

    def one_element(model):
        scalar(model)
        for name in ("scale", "temperature", "unused"):
            setattr(model, name, nn.Parameter(getattr(model, name).detach(), requires_grad=name != "temperature"))

    with_scalars, without = plan_of(one_element), plan_of(lambda model: None)
    # scale (4 bytes) instead of 13 elements over 2 ranks (7 of them, 28 bytes), and three more
    assert with_scalars["parameters"] - without["parameters"] == 4 * 4 - 28
    assert with_scalars["optimizer state"] != without["optimizer state"]


def test_the_plan_keeps_it_out_of_the_groups():
    with torch.device("meta"):
        model = build("conv")
        scalar(model)
    plan = build_plan(model, policy(config(3)), {"Sequential"})
    names = {param.fqn for group in plan.groups for param in group.params}
    assert [param.fqn for param in plan.replicated.params] == ["scale", "temperature", "unused", "stages.0.gain"]
    assert not names & {"scale", "temperature", "unused", "stages.0.gain"}
