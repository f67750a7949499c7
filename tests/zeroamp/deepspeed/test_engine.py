from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import zeroamp.deepspeed as deepspeed
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.processes.training import SmallTraining, adamw, check_runs, check_same_run, full_parameters, same_bits
from tests.selection import slow_but
from tests.zeroamp.deepspeed.engine_cases import NAME, by_boundary, config, loss_at, several_backwards, start, train
from zeroamp.policies.errors import ConfigError, StepError


@pytest.mark.parametrize("stage", slow_but((0, 1, 2, 3), 1, 3))
def test_an_engine_trains_the_bits_of_plain_autocast(ranks2, stage):
    cfg = config(stage, accumulation=2, clip=0.5)
    oracle = one_process.train(NAME, world_size=2, num_steps=3, accumulation=2, clip=0.5, reduce_each=stage >= 2)
    check_runs(ranks2.run(train, cfg, 3), oracle)


@pytest.mark.parametrize(("stage", "in_no_sync"), [(0, False), (2, False), (1, True)])
def test_steps_end_by_the_boundary_or_no_sync(ranks2, stage, in_no_sync):
    """Steps of any number of micro batches end by the boundary or `no_sync`."""
    counts = [3, 1, 2]
    cfg = config(stage, accumulation=1 if in_no_sync else 3)
    oracle = one_process.train(NAME, world_size=2, num_steps=3, accumulation=counts, reduce_each=stage >= 2)
    check_runs(ranks2.run(by_boundary, cfg, counts, in_no_sync=in_no_sync), oracle)


@pytest.mark.parametrize("case", slow_but([(0, 1), (1, 1), (2, 1, True), (3, 1), (3, 2)], (1, 1), (2, 1, True), (3, 2)))
def test_backwards_before_one_step_add_up(ranks2, case):
    stage, accumulation, *boundary = case
    cfg = config(stage, accumulation=accumulation, clip=0.5)
    options = {"world_size": 2, "num_steps": 3, "clip": 0.5, "accumulation": 2 * accumulation}
    check_runs(ranks2.run(several_backwards, cfg, 3, *boundary), one_process.train(NAME, reduce_each=True, **options))


def _mixed_backwards():
    """Steps of several backwards: after `no_sync`, after a failure, of two scales.

    Return their counts, the reported loss of the last step, and the sum of its losses on this rank.
    """
    engine, found = start(config(2, accumulation=1)), []
    with engine.no_sync():
        engine.backward(loss_at(engine, 0))
    for scaled in (True, True):
        engine.backward(loss_at(engine, 1), scale_wrt_gas=scaled)
    engine.step()
    found.append(engine.global_steps)
    engine.backward(loss_at(engine, 2))
    with pytest.raises(StepError):
        engine.backward(loss_at(engine, 2).detach())
    engine.step()
    found.append(engine.global_steps)
    last = 0.0
    for scaled in (False, True):
        loss = loss_at(engine, 3)
        last += float(loss.detach())
        engine.backward(loss, scale_wrt_gas=scaled)
    engine.step()
    return [*found, engine.global_steps], float(engine.report.loss), last


def test_more_backwards_leave_the_count_of_steps_as_it_is(ranks2):
    found = ranks2.run(_mixed_backwards)
    for counts, mean, _ in found:
        assert counts == [1, 2, 3]
        # Added in fp32, in another order than here.
        assert mean == pytest.approx(sum(last for *_, last in found) / 2, rel=1e-6)


def _small_losses_in_fp16():
    """The parameters that an engine and a TrainStep train, on this rank."""
    keys = {"fp16": {"enabled": True, "initial_scale_power": 8}, "zeroamp": {"reproducible": True}}
    cfg = config(3, accumulation=4, dtype=None, **keys)
    engine, training = start(cfg), SmallTraining(cfg, adamw, name="llama_tied")
    for index in range(8):
        engine.backward(loss_at(engine, index) * 1e-4)  # float16 rounds gradients of a fourth otherwise
        engine.step()
        report = training.step(index, 1e-4)
    assert engine.report.loss == report.loss
    return full_parameters(engine.module), training.parameters()


def test_a_reproducible_engine_divides_gradients_once(ranks2):
    for ours, expected in ranks2.run(_small_losses_in_fp16):
        assert same_bits(ours, expected) == []


REFUSED = {
    "step": (lambda engine: engine.step(), "instead of loss.backward()"),
    "loss.backward": (  # leaves gradients
        lambda engine: (loss_of(engine, batch(NAME, 0)).backward(), engine.step()), "instead of loss.backward()",
    ),
    "loss": (lambda engine: (engine.zero_grad(), engine.backward((torch.zeros(()), None))), "is a tuple"),
    "retain_graph": (lambda engine: engine.backward(torch.zeros(()), retain_graph=True), "retain_graph"),
    "train_batch": (lambda engine: engine.train_batch(None), "no pipeline engine"),
    "unknown": (lambda engine: engine.get_global_grad_nrm(1), "get_global_grad_norm"),
    "optimizer.step": (lambda engine: engine.optimizer.step(None), "engine.step()"),
    "set_lr": (lambda engine: engine.set_lr(0.1), "param_groups"),
    "state_dict": (lambda engine: engine.state_dict(), "module_state_dict()"),
    "offload_states": (
        lambda engine: engine.offload_states(include=["weights"]), "optim_states, hp_params, lp_params, lp_grads",
    ),
    "after destroy": (lambda engine: (engine.destroy(), engine.step()), "engine.destroy()"),
}  # fmt: skip
"""What an engine cannot do -> the call, and words of the error. In this order, on one engine."""


def _refused():
    engine = start(config(2))
    for name, (call, says) in REFUSED.items():
        with pytest.raises((StepError, ConfigError, deepspeed.UnsupportedError)) as raised:
            call(engine)
        assert says in str(raised.value), name
    assert not hasattr(engine, "train_batch")
    with pytest.raises(StepError, match=r"that an engine trains. Call engine.backward\(loss\), then engine.step\(\)"):
        loss_of(start({"zero_optimization": {"stage": 2}}), batch(NAME, 0)).backward()  # gradient_clipping: 1.0


def test_what_an_engine_cannot_do_raises_with_the_reason(ranks2):
    ranks2.run(_refused)


def _reads():
    rank = dist.get_rank()
    engine = start(config(3, accumulation=2, clip=0.5, steps_per_print=7))
    train(None, 2, engine=engine)
    sizes = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    assert sizes == (8, 2, 2)
    assert (engine.global_steps, engine.skipped_steps) == (2, 0)
    assert engine.get_lr() == [1e-2]
    assert (engine.zero_optimization(), engine.zero_optimization_stage()) == (True, 3)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled(), engine.torch_autocast_enabled()) == (False, False, True)
    assert (engine.global_rank, engine.world_size, engine.dp_world_size, str(engine.device)) == (rank, 2, 2, "cpu")
    assert (engine.cur_scale, engine.loss_scale(), engine.optimizer.loss_scale, engine.optimizer.overflow) == (
        1.0, 1.0, 1.0, False,
    )  # fmt: skip
    assert next(name for name, _ in engine.named_parameters()).startswith("module.")
    assert engine.logits.__name__ == "logits"  # of the module
    assert (engine.train().module.training, engine.eval().module.training) == (True, False)


def test_what_an_engine_reads(ranks2):
    ranks2.run(_reads)


def _offloaded():
    """Return whether a run that offloads its state between the steps has the losses of one that does not."""
    engine, losses = start(config(3)), []
    for index in range(3):
        losses += train(None, 1, first=index, engine=engine).losses
        engine.offload_states(include=["optim_states"])
        engine.offload_states(include=["hp_params", "lp_params", "lp_grads"])
        engine.reload_states()
    return losses == train(config(3), 3).losses


def test_states_that_are_offloaded_and_reloaded_have_the_same_bits(ranks2):
    assert ranks2.run(_offloaded) == [True, True]


def _of_config():
    torch.manual_seed(torch.distributed.get_rank())  # ranks differ: the first one's weights are taken
    model = build("conv")
    for parameter in model.parameters():
        parameter.data += torch.rand(())
    cfg = config(
        1,
        dtype=None,
        optimizer={"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.99]}},
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
    )
    del cfg["gradient_clipping"]
    groups = [{"params": (p for n, p in model.named_parameters() if "bias" in n), "weight_decay": 0.3}]
    groups.append({"params": [p for n, p in model.named_parameters() if "bias" not in n]})
    samples = [(torch.full((), float(i)), i) for i in range(10)]
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=groups, config=cfg, training_data=samples
    )
    weights = full_parameters(engine.module)
    rates = []
    for i in range(3):
        rates.append(engine.get_lr()[0])
        engine.backward(loss_of(engine, batch("conv", i)))
        engine.step()
    assert rates == pytest.approx([0.0, 0.0, 0.025])  # DeepSpeed begins with two zeros; decimal numbers
    assert scheduler is engine.lr_scheduler
    assert engine.gradient_clipping() == 1.0  # DeepSpeed's default
    assert type(optimizer.optimizer) is torch.optim.AdamW
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.state_dict()["state"].keys() == optimizer.optimizer.state_dict()["state"].keys()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5).step()
    assert engine.get_lr()[0] == pytest.approx(0.1 * 0.5)
    loader.data_sampler.set_epoch(3)
    return weights, [i for _, labels in loader for i in labels.tolist()]


def test_the_config_builds_optimizer_scheduler_and_loader(ranks2):
    (weights, ids), (others, more_ids) = ranks2.run(_of_config)
    assert same_bits(weights, others) == []
    assert (len(ids), len({*ids, *more_ids})) == (5, 10)
    assert ids != sorted(ids)


def _callables():
    model = build(NAME)
    engine, *_, scheduler = deepspeed.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        config=config(1),
    )
    train(None, 2, engine=engine)
    assert engine.get_lr() == [0.25]
    assert scheduler.get_last_lr() == [0.25]
    model = build(NAME)
    only = deepspeed.initialize(model=model, config=config(3))
    assert only[1:] == (None, None, None)
    assert loss_of(only[0], batch(NAME, 0)).isfinite()
    with pytest.raises(StepError, match="has no optimizer"):
        only[0].backward(torch.zeros(()))


def test_functions_make_optimizer_and_scheduler_and_none_is_needed(ranks2):
    ranks2.run(_callables)


WRONG = {
    "mpu": ({"mpu": object()}, "mpu"),
    "no config": ({"config": None}, "one config"),
    "two configs": (
        {"config_params": config(0), "args": SimpleNamespace(deepspeed_config="file.json")}, "one config",
    ),
    "no model": ({"model": None}, "model"),
    "pipeline": ({"config": config(0, pipeline={"stages": 2})}, "pipeline"),
    "scheduler alone": ({"lr_scheduler": "of another"}, "without an optimizer"),
    "foreign optimizer": ({"optimizer": "of another"}, "not one of"),
}  # fmt: skip
"""Arguments of initialize() -> words of the error. "of another": of another model."""


def _wrong():
    optimizer = torch.optim.SGD(build(NAME).parameters(), lr=0.1)
    of_another = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    for arguments, says in WRONG.values():
        given = {name: of_another[name] if value == "of another" else value for name, value in arguments.items()}
        with pytest.raises((StepError, ConfigError, deepspeed.UnsupportedError)) as raised:
            deepspeed.initialize(**{"model": build(NAME), "config": config(0), **given})
        assert says in str(raised.value), arguments
    engine = deepspeed.initialize(model=build(NAME), config={"zero_optimization": {"stage": 1}})[0]
    with pytest.raises(ConfigError, match="train_batch_size"):
        engine.train_batch_size()


def test_wrong_arguments_are_named(ranks2):
    ranks2.run(_wrong)


def _float16():
    engine = start(config(2, dtype=None, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}))
    before = full_parameters(engine.module)
    loss = loss_of(engine, batch(NAME, 0)) * 1e6  # gradients overflow in float16
    engine.backward(loss)
    engine.step()
    skipped = (engine.was_step_applied(), engine.skipped_steps, engine.global_steps, engine.optimizer.overflow)
    assert same_bits(full_parameters(engine.module), before) == []
    assert all(value.dtype == torch.float16 for value in engine.module_state_dict().values())
    train(None, 1, engine=engine)
    return skipped, engine.cur_scale, engine.skipped_steps, engine.dynamic_loss_scale()


def test_a_float16_step_that_overflows_is_skipped_and_counted(ranks2):
    assert ranks2.run(_float16)[0] == ((False, 1, 1, True), 8.0, 1, True)


def _compiled():
    plain = train(config(1), 2)
    engine = start(config(1))
    engine.compile(backend="eager")
    check_same_run(train(None, 2, engine=engine), plain)


@pytest.mark.slow
def test_a_compiled_engine_trains_the_same_bits(ranks2):
    ranks2.run(_compiled)


def _counts_again():
    engine = start(config(2, accumulation=2))
    boundaries, steps = [], []
    # An optimizer step of 3 micro-batches, two of 2, one that is discarded, and one of 2.
    for is_boundary in (False, False, True, None, None, None, None, None, "discard", None, None):
        if is_boundary == "discard":
            engine.train_step.zero_grad()
            continue
        engine.set_gradient_accumulation_boundary(is_boundary)
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.backward(loss_of(engine, batch(NAME, 0)))
        engine.step()
        steps.append(engine.global_steps)
    return boundaries, steps


def test_micro_batches_are_counted_from_the_last_optimizer_step_or_zero_grad(ranks2):
    boundaries = [False, False, True, False, True, False, True, False, False, True]
    assert ranks2.run(_counts_again)[0] == (boundaries, [0, 0, 1, 1, 2, 2, 3, 3, 3, 4])


def _at_the_minimum():
    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}
    engine = start(config(2, accumulation=2, dtype=None, fp16=fp16))
    for micro in range(2):
        engine.backward(loss_of(engine, batch(NAME, micro)) * 1e30)
        if micro == 0:
            engine.step()
    with pytest.raises(StepError, match="min_loss_scale"):
        engine.step()
    return engine.is_gradient_accumulation_boundary()


def test_a_step_that_raised_has_ended_its_optimizer_step(ranks2):
    assert ranks2.run(_at_the_minimum)[0] is False


def _zero_grad():
    engine = start(config(2, accumulation=2))
    engine.zero_grad()
    engine.backward(loss_of(engine, batch(NAME, 0)))
    engine.step()
    for zero_grad in (engine.zero_grad, engine.optimizer.zero_grad):
        with pytest.raises(StepError, match="Remove the call"):
            zero_grad()
    engine.backward(loss_of(engine, batch(NAME, 1)))
    engine.step()
    engine.optimizer.zero_grad()
    return engine.global_steps


def test_a_zero_grad_between_micro_batches_is_an_error(ranks2):
    """A `zero_grad` that would take micro batches from an update is an error."""
    assert ranks2.run(_zero_grad) == [1, 1]
