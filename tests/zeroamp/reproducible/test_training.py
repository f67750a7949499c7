"""`zeroamp.reproducible`: the same bits on any number of ranks, and those of a tree over all micro-batches."""

import pytest
import torch
from torch import nn

import zeroamp
from tests.oracles import tree_of_micro_batches
from tests.processes import reproducible
from tests.processes.ranks import RankError, Ranks
from tests.processes.reproducible import SEED
from tests.processes.training import config, full_parameters, same_bits

NUM_STEPS = 20
CLIP = 0.5


def cfg_of(stage=3, mode="autocast", **more):
    """A reproducible config."""
    cfg = config(stage, dtype=None, clip=CLIP, **more)
    cfg["zeroamp"] = {"reproducible": True, "seed": SEED, **cfg.get("zeroamp", {})}
    if mode == "autocast":
        cfg["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif mode == "bf16":
        cfg["bf16"] = {"enabled": True}
    else:
        cfg["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 6, "hysteresis": 1}
    return cfg


def oracle(name, mode="autocast", *, num_micro_batches=8, num_steps=NUM_STEPS, overflow_at=None):
    """The run in one process, as a `Reproduced`."""
    low = {"autocast": None, "bf16": torch.bfloat16, "fp16": torch.float16}[mode]
    found = tree_of_micro_batches.train(
        lambda: reproducible.build_model(name),
        lambda model, inputs: reproducible.loss(name, model, inputs),
        lambda step, index: reproducible.inputs_of(name, step, index, num_micro_batches),
        num_micro_batches=num_micro_batches,
        num_steps=num_steps,
        make_optimizer=reproducible.adamw,
        autocast=torch.bfloat16 if mode == "autocast" else None,
        low_dtype=low,
        clip=CLIP,
        seed_of=reproducible.seeds,
        scale=256.0 if mode == "fp16" else 1.0,
        growth_interval=6 if mode == "fp16" else 0,
        overflow_at=overflow_at,
    )
    return reproducible.Reproduced(**dict(zip(("losses", "norms", "scales", "parameters"), found, strict=True)))


def check(run, expected):
    """The same losses, norms, loss scales and parameters, bit for bit; nan equals nan."""
    for name in ("losses", "norms", "scales"):
        assert list(map(str, getattr(run, name))) == list(map(str, getattr(expected, name))), name
    assert same_bits(run.parameters, expected.parameters) == []


@pytest.fixture(scope="module")
def ranks1():
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


def runs(ranks_of, sizes, name, cfg, **arguments):
    """Yield the runs of all ranks, for each number of ranks."""
    for size in sizes:
        yield from ranks_of[size].run(reproducible.run, name, cfg, num_steps=NUM_STEPS, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_1_2_and_4_ranks_have_the_bits_of_the_tree(ranks1, ranks2, ranks4, stage):
    ranks_of = {1: ranks1, 2: ranks2, 4: ranks4}
    expected = oracle("dropout")
    for run in runs(ranks_of, (1, 2, 4), "dropout", cfg_of(stage), num_micro_batches=8):
        check(run, expected)


FAST = [
    pytest.param("moe", "bf16", {"stage": 2}, None, marks=pytest.mark.slow),
    ("llama_untied", "fp16", {}, None),
    # A unit that runs several times in a forward.
    ("recurrent", "autocast", {"stage": 3}, None),
    pytest.param("lora", "autocast", {"stage": 2}, None, marks=pytest.mark.slow),
    # Parameters that only the last micro-batch of a rank uses.
    pytest.param("chosen", "bf16", {"stage": 2}, None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mode", "options", "mesh_shape"), FAST)
def test_2_ranks_have_the_bits_of_the_tree(ranks2, name, mode, options, mesh_shape):
    overflow_at = (7, 5) if mode == "fp16" else None
    expected = oracle(name, mode, overflow_at=overflow_at)
    arguments = {"num_micro_batches": 8, "mesh_shape": mesh_shape, "overflow_at": overflow_at}
    for run in runs({2: ranks2}, [2], name, cfg_of(mode=mode, **options), **arguments):
        check(run, expected)
    if mode == "fp16":
        assert expected.scales[6:9] == [256, 512, 256], "the loss scale must have grown and fallen"


EVERYWHERE = [
    *((name, "autocast", 3) for name in ("llama_tied", "llama_untied", "moe", "conv", "lora", "dropout")),
    *((name, mode, 2) for name in ("dropout", "moe") for mode in ("bf16", "fp16")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "stage"), EVERYWHERE)
def test_1_to_8_ranks_have_the_bits_of_the_tree(ranks1, ranks2, ranks4, ranks8, name, mode, stage):
    ranks_of = {1: ranks1, 2: ranks2, 4: ranks4, 8: ranks8}
    overflow_at = (7, 5) if mode == "fp16" else None
    expected = oracle(name, mode, overflow_at=overflow_at)
    arguments = {"num_micro_batches": 8, "overflow_at": overflow_at}
    for run in runs(ranks_of, (1, 2, 4, 8), name, cfg_of(stage, mode), **arguments):
        check(run, expected)


@pytest.mark.slow
def test_12_micro_batches_on_1_2_and_4_ranks_have_the_bits_of_the_tree(ranks1, ranks2, ranks4):
    # 12 is no power of two, but its tree has the subtrees that 1, 2 and 4 ranks add.
    expected = oracle("dropout", num_micro_batches=12)
    for run in runs({1: ranks1, 2: ranks2, 4: ranks4}, (1, 2, 4), "dropout", cfg_of(), num_micro_batches=12):
        check(run, expected)


def _with_and_without():
    """The norms and parameters of a run without `reproducible`, and of one with it, on this rank."""
    found = []
    for keys in ({}, {"reproducible": True}):
        cfg = cfg_of(gradient_accumulation_steps=4)
        model = zeroamp.wrap_model(
            reproducible.build_model("llama_tied"), zeroamp.policy_from_config({**cfg, "zeroamp": keys})
        )
        train = zeroamp.TrainStep(model, reproducible.adamw(model))
        norms = []
        for step in range(4):
            for index in zeroamp.micro_batch_indices(train):
                inputs = reproducible.inputs_of("llama_tied", step, index, 8)
                train.backward(reproducible.loss("llama_tied", model, inputs))
                report = train.step()
            norms.append(report.grad_norm)
        found.append((norms, full_parameters(model)))
    return found


def test_sums_one_after_the_other_have_other_bits_than_the_tree(ranks2):
    # Were they the same, the tests above would show nothing.
    ((norms, parameters), (norms_of_tree, parameters_of_tree)), *_ = ranks2.run(_with_and_without)
    assert same_bits(parameters, parameters_of_tree) != []
    assert norms == pytest.approx(norms_of_tree, rel=1e-4)  # the same sums, rounded elsewhere


REFUSED = [
    ({"zeroamp": {"seed": 3}}, "zeroamp.seed is 3"),
    ({"zeroamp": {"reproducible": True, "reduce_accumulate_dtype": "native"}}, "reduce_accumulate_dtype"),
    ({"zeroamp": {"reproducible": True, "partials_between_nodes": "bf16"}}, "partials_between_nodes"),
    ({"zeroamp": {"reproducible": True}, "data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype"),
    *(({"zeroamp": {"reproducible": True}, "zero_optimization": {"stage": n}}, f"the stage is {n}") for n in (0, 1)),
]


@pytest.mark.parametrize(("cfg", "match"), REFUSED, ids=[match for _, match in REFUSED])
def test_a_config_that_cannot_be_kept_is_refused(cfg, match):
    with pytest.raises(zeroamp.ConfigError, match=match):
        zeroamp.policy_from_config(cfg)


def _on_3_ranks():
    zeroamp.wrap_model(reproducible.build_model("dropout"), zeroamp.policy_from_config(cfg_of()))


def test_3_ranks_are_refused():
    ranks = Ranks(3)
    try:
        with pytest.raises(RankError, match="number of ranks must be a power of two, but is 3"):
            ranks.run(_on_3_ranks)
    finally:
        ranks.stop()


def _refused():
    found = []

    def attempt(error, body, *arguments, **keywords):
        with pytest.raises(error) as raised:
            body(*arguments, **keywords)
        found.append(str(raised.value))

    def wrapped(model, stage=3, **more):
        return zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg_of(stage, **more)))

    attempt(zeroamp.ConfigError, wrapped, reproducible.build_model("dropout"), zeroamp={"dp_replicate_size": 2})
    scaled = nn.Linear(2, 2)
    scaled.temperature = nn.Parameter(torch.tensor(1.0))
    attempt(zeroamp.WrapError, wrapped, scaled)
    attempt(zeroamp.WrapError, wrapped, nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    model = wrapped(reproducible.build_model("dropout"), gradient_accumulation_steps=2)
    attempt(zeroamp.StepError, zeroamp.TrainStep, model, torch.optim.LBFGS(model.parameters()))
    adafactor = torch.optim.Adafactor(model.parameters())
    attempt(zeroamp.StepError, zeroamp.TrainStep, model, adafactor)
    train = zeroamp.TrainStep(model, reproducible.adamw(model))
    inputs = reproducible.inputs_of("dropout", 0, 0, 2)
    train.backward(model(inputs))
    train.step()
    attempt(zeroamp.StepError, train.backward, model(inputs), divide=False)
    train.zero_grad()
    attempt(zeroamp.StepError, zeroamp.TrainStep, model, torch.optim.AdamW(model.parameters(), fused=True))
    model = wrapped(reproducible.build_model("dropout"), zeroamp={"reduce": "sum"})
    attempt(zeroamp.StepError, zeroamp.TrainStep(model, reproducible.adamw(model)).backward, model(inputs))
    model = wrapped(reproducible.build_model("dropout"), mode="fp16")
    train = zeroamp.TrainStep(model, reproducible.adamw(model))
    attempt(zeroamp.StepError, train.backward, model(inputs), divide=False)
    return found


def test_what_cannot_be_kept_is_refused_by_name(ranks2):
    words = [
        "but replicas would be added last",
        "is a trainable 0-D parameter",
        "1 is a BatchNorm2d",
        "LBFGS",
        "Adafactor, which needs statistics of whole parameters",
        "divide=True for some micro-batches",
        "AdamW with fused=True and parameters on the CPU",
        'divide=True with zeroamp.reproducible and zeroamp.reduce "sum"',
        "divide=False in float16",
    ]
    for found, expected in zip(ranks2.run(_refused)[0], words, strict=True):
        assert expected in found
