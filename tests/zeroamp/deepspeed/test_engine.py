import pytest
import torch
import torch.distributed as dist

import zeroamp
import zeroamp.deepspeed as deepspeed
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.processes.training import check_same_run, full_parameters, same_bits
from tests.processes.training import config as plain_config
from tests.processes.training import train as train_plain
from tests.selection import slow_but
from tests.zeroamp.deepspeed.engine_cases import by_boundary, config, start, train
from zeroamp.policies.errors import ConfigError, StepError

NAME = "llama_tied"


FP32 = {"communication_data_type": "fp32"}  # at stage 1, bf16 would round the accumulated gradient


def _like_train_step(stage):
    ours = train(NAME, config(stage, accumulation=2, clip=0.5, **FP32), 3)
    check_same_run(ours, train_plain(NAME, plain_config(stage, accumulation=2, clip=0.5, **FP32), 3))
    return ours


@pytest.mark.parametrize("stage", slow_but((0, 1, 2, 3), 1, 3))
def test_an_engine_trains_the_bits_of_a_train_step_and_of_plain_autocast(ranks2, stage):
    runs = ranks2.run(_like_train_step, stage)
    losses, norms, parameters = one_process.train(
        NAME, world_size=2, num_steps=3, accumulation=2, clip=0.5, reduce_each=stage >= 2
    )
    for rank, run in enumerate(runs):
        assert run.losses == [step[rank] for step in losses]
        assert run.norms == [float(norm) for norm in norms]
        assert same_bits(run.parameters, parameters) == []


@pytest.mark.parametrize("stage", slow_but((0, 1, 2, 3), 0, 2))
def test_steps_of_any_number_of_micro_batches_end_by_the_boundary(ranks2, stage):
    counts = [3, 1, 2]
    runs = ranks2.run(by_boundary, NAME, config(stage, accumulation=3, **FP32), counts)
    losses, norms, parameters = one_process.train(
        NAME, world_size=2, num_steps=3, accumulation=counts, reduce_each=stage >= 2
    )
    for rank, run in enumerate(runs):
        assert run.losses == [step[rank] for step in losses]
        assert run.norms == [float(norm) for norm in norms]
        assert same_bits(run.parameters, parameters) == []


def test_no_sync_accumulates_without_communication(ranks2):
    runs = ranks2.run(by_boundary, NAME, config(1, **FP32), [2, 3], in_no_sync=True)
    losses, _, parameters = one_process.train(NAME, world_size=2, num_steps=2, accumulation=[2, 3])
    for rank, run in enumerate(runs):
        assert run.losses == [step[rank] for step in losses]
        assert same_bits(run.parameters, parameters) == []


def _small_losses_in_fp16():
    """The parameters that an engine and a TrainStep train, on this rank."""
    keys = {"fp16": {"enabled": True, "initial_scale_power": 8}, "zeroamp": {"reproducible": True}}
    cfg = config(3, accumulation=4, dtype=None, **keys)
    engine = start(NAME, cfg)
    model = zeroamp.wrap_model(build(NAME), zeroamp.policy_from_config(cfg))
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    for index in range(8):
        engine.backward(loss_of(engine, batch(NAME, index)) * 1e-4)  # float16 rounds gradients of a fourth otherwise
        engine.step()
        step.backward(loss_of(model, batch(NAME, index)) * 1e-4)
        report = step.step()
    assert engine.report.loss == report.loss
    return full_parameters(engine.module), full_parameters(model)


def test_a_reproducible_engine_divides_gradients_once(ranks2):
    for ours, expected in ranks2.run(_small_losses_in_fp16):
        assert same_bits(ours, expected) == []


def _plain_backward(engine):
    loss_of(engine, batch(NAME, 0)).backward()


def _refused():
    texts = {}
    engine = start(NAME, config(2))
    for name, call in {
        "step": engine.step,
        "loss.backward": lambda: (_plain_backward(engine), engine.step()),  # leaves gradients
        "loss": lambda: (engine.zero_grad(), engine.backward((torch.zeros(()), None))),
        "retain_graph": lambda: engine.backward(torch.zeros(()), retain_graph=True),
        "train_batch": lambda: engine.train_batch(None),
        "unknown": lambda: engine.get_global_grad_nrm(1),
        "optimizer.step": lambda: engine.optimizer.step(None),
        "set_lr": lambda: engine.set_lr(0.1),
        "state_dict": engine.state_dict,
    }.items():
        with pytest.raises((StepError, ConfigError, deepspeed.UnsupportedError)) as raised:
            call()
        texts[name] = str(raised.value)
    assert not hasattr(engine, "train_batch")
    engine.destroy()
    with pytest.raises(StepError, match=r"engine\.destroy\(\)"):
        engine.step()
    return texts


def test_what_an_engine_cannot_do_raises_with_the_reason(ranks2):
    texts = ranks2.run(_refused)[0]
    assert "instead of loss.backward()" in texts["step"]
    assert "instead of loss.backward()" in texts["loss.backward"]
    assert "is a tuple" in texts["loss"]
    assert "retain_graph" in texts["retain_graph"]
    assert "no pipeline parallelism" in texts["train_batch"]
    assert "get_global_grad_norm" in texts["unknown"]
    assert "engine.step()" in texts["optimizer.step"]
    assert "param_groups" in texts["set_lr"]
    assert "module_state_dict()" in texts["state_dict"]


def _reads():
    engine = start(NAME, config(3, accumulation=2, clip=0.5, steps_per_print=7))
    sizes = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    train(NAME, None, 2, engine=engine)
    return {
        "sizes": sizes,
        "counts": (engine.global_steps, engine.skipped_steps),
        "lr": engine.get_lr(),
        "stage": (engine.zero_optimization(), engine.zero_optimization_stage()),
        "modes": (engine.bfloat16_enabled(), engine.fp16_enabled(), engine.torch_autocast_enabled()),
        "ranks": (engine.global_rank, engine.world_size, engine.dp_world_size, str(engine.device)),
        "scale": (engine.cur_scale, engine.loss_scale(), engine.optimizer.loss_scale, engine.optimizer.overflow),
        "names": [name for name, _ in engine.named_parameters()][:1],
        "of the module": engine.logits.__name__,
        "modes of the module": (engine.train().module.training, engine.eval().module.training),
    }


def _offloaded():
    """Return whether a run that offloads its state between the steps has the losses of one that does not."""
    losses = {}
    for offloads in (False, True):
        engine = start(NAME, config(3))
        losses[offloads] = []
        for index in range(3):
            loss = loss_of(engine, batch(NAME, 2 * index + dist.get_rank()))
            losses[offloads].append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
            if offloads:
                engine.offload_states(include=["optim_states"])
                engine.offload_states(include=["hp_params", "lp_params", "lp_grads"])
                engine.reload_states()
    with pytest.raises(ConfigError, match="optim_states, hp_params, .* but has weights"):
        engine.offload_states(include=["weights"])
    return losses[True] == losses[False]


def test_states_that_are_offloaded_and_reloaded_have_the_same_bits(ranks2):
    assert ranks2.run(_offloaded) == [True, True]


def test_what_an_engine_reads(ranks2):
    reads = ranks2.run(_reads)
    first = reads[0]
    assert first["sizes"] == (8, 2, 2)
    assert first["counts"] == (2, 0)
    assert first["lr"] == [1e-2]
    assert first["stage"] == (True, 3)
    assert first["modes"] == (False, False, True)
    assert [read["ranks"] for read in reads] == [(0, 2, 2, "cpu"), (1, 2, 2, "cpu")]
    assert first["scale"] == (1.0, 1.0, 1.0, False)
    assert first["names"][0].startswith("module.")
    assert first["of the module"] == "logits"
    assert first["modes of the module"] == (True, False)


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
    rates = []
    for i in range(3):
        rates.append(engine.get_lr()[0])
        engine.backward(loss_of(engine, batch("conv", i)))
        engine.step()
    loader.data_sampler.set_epoch(3)
    assert optimizer.state_dict()["state"].keys() == optimizer.optimizer.state_dict()["state"].keys()
    ids = [i for _, labels in loader for i in labels.tolist()]
    later = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    later.step()
    return {
        "clipping": engine.gradient_clipping(),
        "optimizer": type(optimizer.optimizer).__name__,
        "groups": [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups],
        "rates": rates,
        "scheduler": scheduler is engine.lr_scheduler,
        "ids": ids,
        "later": engine.get_lr()[0],
        "weights": full_parameters(engine.module)["head.weight"].tolist(),
    }


def test_the_config_builds_optimizer_scheduler_and_loader(ranks2):
    first, second = ranks2.run(_of_config)
    assert first["clipping"] == 1.0  # DeepSpeed's default
    assert first["optimizer"] == "AdamW"
    assert [decay for decay, _ in first["groups"]] == [0.3, 0.0]
    assert first["rates"] == pytest.approx([0.0, 0.0, 0.025])  # DeepSpeed begins with two zeros; decimal numbers
    assert first["scheduler"]
    assert (len(first["ids"]), len({*first["ids"], *second["ids"]})) == (5, 10)
    assert first["ids"] != sorted(first["ids"])
    assert first["later"] == pytest.approx(0.1 * 0.5)
    assert first["weights"] == second["weights"]


def _callables():
    model = build(NAME)
    engine, *_, scheduler = deepspeed.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        config=config(1),
    )
    train(NAME, None, 2, engine=engine)
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


def _wrong():
    texts = []
    model, other = build(NAME), build(NAME)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    for kwargs in (
        {"mpu": object()},
        {"config": None},
        {"config_params": config(0), "args": type("Args", (), {"deepspeed_config": "file.json"})()},
        {"model": None},
        {"config": config(0, pipeline={"stages": 2})},
        {"lr_scheduler": torch.optim.lr_scheduler.StepLR(own, 1)},
    ):
        with pytest.raises((StepError, ConfigError, deepspeed.UnsupportedError)) as raised:
            deepspeed.initialize(**{"model": model, "config": config(0), **kwargs})
        texts.append(str(raised.value))
    with pytest.raises(StepError) as raised:
        deepspeed.initialize(model=build(NAME), config=config(0), optimizer=foreign)
    texts.append(str(raised.value))
    engine = deepspeed.initialize(model=model, config={"zero_optimization": {"stage": 1}})[0]
    with pytest.raises(ConfigError, match="train_batch_size"):
        engine.train_batch_size()
    return texts


def test_wrong_arguments_are_named(ranks2):
    texts = ranks2.run(_wrong)[0]
    words = ["mpu", "one config", "one config", "model", "pipeline", "without an optimizer", "not one of"]
    for word, text in zip(words, texts, strict=True):
        assert word in text


def _float16():
    engine = start(NAME, config(2, dtype=None, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}))
    before = full_parameters(engine.module)
    loss = loss_of(engine, batch(NAME, 0)) * 1e6  # gradients overflow in float16
    engine.backward(loss)
    engine.step()
    skipped = (engine.was_step_applied(), engine.skipped_steps, engine.global_steps, engine.optimizer.overflow)
    assert same_bits(full_parameters(engine.module), before) == []
    assert all(value.dtype == torch.float16 for value in engine.module_state_dict().values())
    train(NAME, None, 1, engine=engine)
    return skipped, engine.cur_scale, engine.skipped_steps, engine.dynamic_loss_scale()


def test_a_float16_step_that_overflows_is_skipped_and_counted(ranks2):
    assert ranks2.run(_float16)[0] == ((False, 1, 1, True), 8.0, 1, True)


def _compiled():
    plain = train(NAME, config(1), 2)
    engine = start(NAME, config(1))
    engine.compile(backend="eager")
    check_same_run(train(NAME, None, 2, engine=engine), plain)


@pytest.mark.slow
def test_a_compiled_engine_trains_the_same_bits(ranks2):
    ranks2.run(_compiled)


def _counts_again():
    engine = start(NAME, config(2, accumulation=2))
    boundaries, steps = [], []
    for is_boundary in (False, False, True, None, None, None, None):  # an optimizer step of 3 micro-batches, two of 2
        engine.set_gradient_accumulation_boundary(is_boundary)
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.backward(loss_of(engine, batch(NAME, 0)))
        engine.step()
        steps.append(engine.global_steps)
    return boundaries, steps


def test_micro_batches_are_counted_from_the_last_optimizer_step(ranks2):
    expected = [False, False, True, False, True, False, True], [0, 0, 1, 1, 2, 2, 3]
    assert ranks2.run(_counts_again)[0] == expected


def _counts_from_zero():
    engine = start(NAME, config(2, accumulation=3))
    boundaries = []
    for micro in range(2):
        engine.backward(loss_of(engine, batch(NAME, micro)))
        engine.step()
    engine.train_step.zero_grad()
    for micro in range(3):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.backward(loss_of(engine, batch(NAME, micro)))
        engine.step()
    return boundaries, engine.global_steps


def test_after_zero_grad_an_optimizer_step_has_all_its_micro_batches(ranks2):
    assert ranks2.run(_counts_from_zero)[0] == ([False, False, True], 1)


def _at_the_minimum():
    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}
    engine = start(NAME, config(2, accumulation=2, dtype=None, fp16=fp16))
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
    engine = start(NAME, config(2, accumulation=2))
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


def test_a_zero_grad_that_would_take_micro_batches_from_an_update_is_an_error(ranks2):
    assert ranks2.run(_zero_grad) == [1, 1]
