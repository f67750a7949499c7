"""Training goes on from DeepSpeed's checkpoint: optimizer state, counters, loss scale and scheduler."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.deepspeed import batch, build, param_groups
from tests.processes.ranks import RankError
from tests.processes.training import full_parameters
from tests.selection import slow_but
from tests.zeroamp.deepspeed.cases import DATA, TRAINED, expected, facts
from zeroamp.deepspeed.archives import Inert
from zeroamp.deepspeed.files import read_file
from zeroamp.deepspeed.training import _plan_loss_scale

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 10}}}
NUM_STEPS = 3


def _train_step(cfg, *, make=torch.optim.AdamW, groups=param_groups, stage=3):
    model = build(seed=1)
    policy = zeroamp.policy_from_config({"zero_optimization": {"stage": stage}, **cfg})
    zeroamp.wrap_model(model, policy, None, {"Block"})
    optimizer = make(groups(model))
    scheduler = zeroamp.scheduler_from_config(policy, optimizer) if policy.scheduler is not None else None
    return zeroamp.TrainStep(model, optimizer, scheduler)


def _load(case, cfg=AUTOCAST, **options):
    train = _train_step(cfg, **options)
    return train, zeroamp.load_deepspeed_checkpoint(DATA / case, train.model, train)


def _state(case, stage):
    """The names of the optimizer's tensors that differ in any bit, the numbers of steps, and the rest."""
    train, loaded = _load(case, stage=stage)
    state, model = train.optimizers[0].state, train.model
    differ, num_steps = [], set()
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, tensor in expected(case, kind).items():
            ours = state[model.get_parameter(name)]
            num_steps.add(float(ours["step"]))
            differ += [] if torch.equal(ours[kind].full_tensor(), tensor) else [f"{kind} of {name}"]
    return differ, num_steps, len(state), train.state_dict(), loaded.not_loaded


@pytest.mark.parametrize("num_ranks", slow_but([2, 4], 2))
@pytest.mark.parametrize("case", TRAINED)
def test_the_optimizer_state_is_deepspeeds_bit_for_bit(request, case, num_ranks):
    ranks = request.getfixturevalue(f"ranks{num_ranks}")
    skipped = facts(case)["skipped_steps"]
    for differ, num_steps, num_parameters, state, _ in ranks.run(_state, case, 4 - num_ranks // 2):
        assert differ == []
        assert num_steps == ({3 - skipped} if skipped < 3 else set())
        assert num_parameters == (7 if skipped < 3 else 0)  # embed and head are one, frozen has none
        assert (state["num_steps"], state["num_skipped"]) == (3 - skipped, skipped)


def _continue(case, stage):
    train, _ = _load(case, stage=stage)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(NUM_STEPS):
        loss = train.model(batch((10 + step) * world_size + rank))
        losses.append(float(loss.detach()))
        train.backward(loss)
        train.step()
    return losses, full_parameters(train.model)


def _continued_in_plain_torch(case, world_size):
    """The expected tensors, torch's AdamW and autocast, in one process, the ranks written out."""
    model = build()
    with torch.no_grad():
        for name, tensor in expected(case, "fp32").items():
            model.get_parameter(name).copy_(tensor)
    optimizer = torch.optim.AdamW(param_groups(model))
    moments = {kind: expected(case, kind) for kind in ("exp_avg", "exp_avg_sq")}
    for name in moments["exp_avg"]:
        tensors = {kind: named[name].clone() for kind, named in moments.items()}
        optimizer.state[model.get_parameter(name)] = {"step": torch.tensor(3.0), **tensors}
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = []
    for step in range(NUM_STEPS):
        by_rank = []
        for rank in range(world_size):
            with torch.autocast("cpu", torch.bfloat16):
                by_rank.append(model(batch((10 + step) * world_size + rank)))
        losses.append([float(loss.detach()) for loss in by_rank])
        gradients = [torch.autograd.grad(loss, trained) for loss in by_rank]
        for index, parameter in enumerate(trained):
            parameter.grad = sum(rank[index] for rank in gradients) / world_size
        optimizer.step()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("case", ["stage1_autocast", "stage2_autocast"])
def test_training_goes_on_as_plain_torch_does_from_the_same_tensors(ranks2, case, stage):
    losses, parameters = _continued_in_plain_torch(case, world_size=2)
    ours = ranks2.run(_continue, case, stage)
    assert [list(step) for step in zip(*(rank_losses for rank_losses, _ in ours), strict=True)] == losses
    for _, found in ours:
        assert [name for name in parameters if not torch.equal(found[name], parameters[name])] == []


def _loss_scale(case, cfg):
    train, loaded = _load(case, cfg)
    return train.state_dict()["loss_scale"], loaded.not_loaded


def test_a_dynamic_loss_scale_goes_on_where_it_was(ranks2):
    scale = {"kind": "dynamic", "scale": 4096.0, "hysteresis_left": 1, "num_steps": 3, "last_overflow": 1}
    assert ranks2.run(_loss_scale, "stage3_fp16", FP16) == [(scale, ())] * 2
    used_up = {"kind": "dynamic", "scale": 2.0**28, "hysteresis_left": 1, "num_steps": 3, "last_overflow": 2}  # of 2
    assert ranks2.run(_loss_scale, "stage1_fp16_never_stepped", FP16)[0] == (used_up, ())
    untouched = {"kind": "dynamic", "scale": 2.0**20, "hysteresis_left": 2, "num_steps": 0, "last_overflow": -1}
    assert ranks2.run(_loss_scale, "stage3_bf16", FP16)[0] == (untouched, ())


def test_a_loss_scale_that_the_config_has_no_use_for_is_named(ranks2):
    for cfg in (AUTOCAST, {"fp16": {"enabled": True, "loss_scale": 64}}):
        scale, not_loaded = ranks2.run(_loss_scale, "stage3_fp16", cfg)[0]
        assert scale["num_steps"] == 0
        assert not_loaded == ("the dynamic loss scale 4096: the config has none",)


def test_a_loss_scaler_with_a_state_that_is_no_mapping_is_refused_by_name():
    scaler = Inert()
    scaler.__setstate__([("cur_scale", 8.0)])
    with pytest.raises(zeroamp.CheckpointError, match="loss_scaler must be .* a list"):
        _plan_loss_scale(None, SimpleNamespace(loss_scaler=scaler))


def _learning_rates(case, cfg):
    train, loaded = _load(case, cfg)
    rates = [group["lr"] for group in train.optimizers[0].param_groups]
    after = train.schedulers[0].state_dict() if train.schedulers[0] is not None else None
    return rates, after and after["last_epoch"], loaded.lr_scheduler, loaded.not_loaded


@pytest.mark.parametrize(("case", "num_steps"), [("stage3_autocast", 3), ("stage2_fp16", 1)])
def test_the_scheduler_of_the_config_goes_on_at_the_coming_step(ranks2, case, num_steps):
    rates, last_epoch, saved, not_loaded = ranks2.run(_learning_rates, case, AUTOCAST | WARMUP)[0]
    assert rates == facts(case)["lr"]
    assert last_epoch == num_steps
    assert saved == {"last_batch_iteration": num_steps - 1}
    assert "scheduler" not in str(not_loaded)


def test_a_scheduler_that_is_not_the_configs_is_named_and_its_state_returned(ranks2):
    rates, _, saved, not_loaded = ranks2.run(_learning_rates, "stage3_autocast", AUTOCAST)[0]
    assert rates == facts("stage3_autocast")["lr"]
    assert saved == {"last_batch_iteration": 2}
    assert not_loaded == ("the scheduler's state, which lr_scheduler of the result holds",)


def _trained_apart(model):
    return [{"params": [p], "lr": 1.0, "eps": 1.0} for p in model.parameters() if p.requires_grad]


def _in_one_group(model):
    return list(model.parameters())


def _learning_rate_tensors(model):
    return [group | {"lr": torch.tensor(1.0)} for group in param_groups(model)]


def _half(model):
    return [{"params": [model.gains], "lr": 1.0}]


def _groups(case, groups):
    train, loaded = _load(case, groups=groups)
    keys = ("lr", "betas", "eps", "weight_decay")
    return [tuple(group[key] for key in keys) for group in train.optimizers[0].param_groups], loaded.not_loaded


def test_every_param_group_gets_the_hyperparameters_of_its_parameters(ranks2):
    matrices, vectors = (1e-2, (0.9, 0.999), 1e-8, 0.1), (3e-3, (0.8, 0.99), 1e-8, 0.0)
    found, not_loaded = ranks2.run(_groups, "stage3_bf16", _trained_apart)[0]
    assert sorted(found) == sorted([matrices] * 3 + [vectors] * 4)
    assert not_loaded == ()


def test_a_learning_rate_that_is_a_tensor_stays_one(ranks2):
    found, _ = ranks2.run(_groups, "stage3_bf16", _learning_rate_tensors)[0]
    assert [lr for lr, *_ in found] == [torch.tensor(1e-2), torch.tensor(3e-3)]
    assert all(isinstance(lr, torch.Tensor) for lr, *_ in found)


def test_parameters_that_the_optimizer_does_not_hold_are_named(ranks2):
    found, not_loaded = ranks2.run(_groups, "stage2_autocast", _half)[0]
    assert found == [(3e-3, (0.8, 0.99), 1e-8, 0.0)]
    assert len(not_loaded) == 6
    assert "optimizer state of embed.weight, which the optimizer does not hold" in not_loaded


def test_hyperparameters_that_were_not_saved_are_named(ranks2):
    *_, not_loaded = ranks2.run(_state, "stage2_bf16", 3)[0]
    assert not_loaded == ("hyperparameters of the param groups, which elastic_checkpoint does not save",)


def _make(name):
    return {
        "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
        "Adam": torch.optim.Adam,
        "amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
        "AdamW": torch.optim.AdamW,
    }[name]


def _refused(case, optimizer, groups):
    _load(case, make=_make(optimizer), groups=groups)


@pytest.mark.parametrize(
    ("case", "optimizer", "groups", "text"),
    [
        ("stage2_fp16", "SGD", param_groups, "Adam or AdamW.* is SGD.*Leave out train"),
        ("stage2_fp16", "Adam", param_groups, r"param_groups\[0\]: decoupled_weight_decay must be True.* is False"),
        ("stage2_fp16", "amsgrad", param_groups, r"param_groups\[0\]: amsgrad must be False.* is True"),
        ("stage3_bf16", "AdamW", _in_one_group, r"param_groups\[0\] .*saved groups \[0, 1\].*differ"),
        (
            "stage0_autocast",
            "AdamW",
            param_groups,
            "saved at ZeRO stage 0, where DeepSpeed stores it without parameter names",
        ),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused(ranks2, case, optimizer, groups, text):
    with pytest.raises(RankError, match=rf"CheckpointError: .*{text}"):
        ranks2.run(_refused, case, optimizer, groups)


def _inside_a_window():
    train = _train_step(AUTOCAST | {"gradient_accumulation_steps": 2})
    train.backward(train.model(batch(0)))
    train.step()
    before = full_parameters(train.model)
    with pytest.raises(zeroamp.StepError, match="1 micro-batch"):
        zeroamp.load_deepspeed_checkpoint(DATA / "stage3_bf16", train.model, train)
    return all(torch.equal(tensor, before[name]) for name, tensor in full_parameters(train.model).items())


def test_a_step_inside_an_accumulation_window_is_refused_before_anything_is_changed(ranks2):
    assert ranks2.run(_inside_a_window) == [True, True]


def _around_another():
    zeroamp.load_deepspeed_checkpoint(DATA / "stage3_bf16", _train_step(AUTOCAST).model, _train_step(AUTOCAST))


def test_a_step_around_another_model_is_refused(ranks2):
    with pytest.raises(RankError, match="train must be the TrainStep of `model`"):
        ranks2.run(_around_another)


def _weights_alone():
    train = _train_step(AUTOCAST)
    loaded = zeroamp.load_deepspeed_checkpoint(DATA / "stage3_bf16", train.model)
    return len(train.optimizers[0].state), train.num_steps, loaded.not_loaded


def test_without_a_train_step_the_optimizer_is_left_alone_and_that_is_said(ranks2):
    state, num_steps, (text,) = ranks2.run(_weights_alone)[0]
    assert (state, num_steps) == (0, 0)
    assert text.startswith("optimizer state, counters")


def test_state_of_another_optimizer_is_refused(ranks2, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(DATA / "stage1_bf16", folder)
    for path in (folder / "global_step3").glob("bf16_*"):
        optimizer = read_file(path).get("optimizer_state_dict", dict)
        del optimizer["param_slice_mappings"]  # of a class of DeepSpeed
        for state in optimizer["base_optimizer_state"]["state"].values():
            state["momentum_buffer"] = state.pop("exp_avg")
        torch.save({"optimizer_state_dict": optimizer}, tmp_path / "changed")
        (tmp_path / "changed").replace(path)
    with pytest.raises(RankError, match=r"exp_avg and exp_avg_sq.*momentum_buffer"):
        ranks2.run(_load, folder)
