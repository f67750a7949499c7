"""`zeroamp.reproducible`: the same bits on any number of ranks, and those of a tree over all micro-batches."""

import pytest
import torch
from torch import nn

import zeroamp
from tests.oracles import tree_of_micro_batches
from tests.processes import reproducible
from tests.processes.ranks import RankError, Ranks
from tests.processes.reproducible import SEED
from tests.processes.training import check_errors, config, errors_of, same_bits
from tests.selection import slow_but

NUM_STEPS = 6
GROWTH_INTERVAL = 2
OVERFLOW_AT = (4, 5)
"""Step and micro-batch."""
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
        cfg["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": GROWTH_INTERVAL, "hysteresis": 1}
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
        growth_interval=GROWTH_INTERVAL if mode == "fp16" else 0,
        overflow_at=overflow_at,
    )
    return reproducible.Reproduced(**dict(zip(("losses", "norms", "scales", "parameters"), found, strict=True)))


def check(run, expected):
    """The same losses, norms, loss scales and parameters, bit for bit; nan equals nan."""
    for name in ("losses", "norms", "scales"):
        assert list(map(str, getattr(run, name))) == list(map(str, getattr(expected, name))), name
    assert same_bits(run.parameters, expected.parameters) == []


CASES = {
    "overflows": ((2,), "llama_untied", "fp16", 3, 8),
    "a unit that runs several times": ((2,), "recurrent", "autocast", 3, 8),
    "parameters that only a rank's last micro-batch uses": ((2,), "chosen", "bf16", 2, 8),
    "adapters": ((2,), "lora", "autocast", 2, 8),
    "dropout": ((1, 2, 4), "dropout", "autocast", 3, 4),
    "experts": ((1, 4), "moe", "bf16", 2, 8),
    # 12 is no power of two, but its tree has the subtrees that 1, 2 and 4 ranks add.
    "12 micro-batches": ((2, 4), "dropout", "autocast", 3, 12),
}
"""Numbers of ranks, model, mode, stage, and micro-batches per optimizer step."""


@pytest.mark.parametrize("case", slow_but(CASES, "overflows"))
def test_any_number_of_ranks_has_the_bits_of_the_tree(request, case):
    sizes, name, mode, stage, num_micro_batches = CASES[case]
    arguments = {"num_micro_batches": num_micro_batches, "overflow_at": OVERFLOW_AT if mode == "fp16" else None}
    arguments["num_steps"] = NUM_STEPS if mode == "fp16" else 3
    expected = oracle(name, mode, **arguments)
    for size in sizes:
        ranks = request.getfixturevalue(f"ranks{size}")
        for run in ranks.run(reproducible.run, name, cfg_of(stage, mode), **arguments):
            check(run, expected)
    if mode == "fp16":
        assert expected.scales[2:6] == [256, 512, 512, 256], "a step must have a scale that has grown"


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
    def wrapped(model, stage=3, **more):
        return zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg_of(stage, **more)))

    def trained(make_optimizer=reproducible.adamw, **more):
        model = wrapped(reproducible.build_model("dropout"), **more)
        return zeroamp.TrainStep(model, make_optimizer(model))

    def backward(train, **flags):
        train.backward(train.model(reproducible.inputs_of("dropout", 0, 0, 2)), **flags)

    def mixed():
        train = trained(gradient_accumulation_steps=2)
        backward(train)
        train.step()
        backward(train, divide=False)

    scaled = nn.Linear(2, 2)
    scaled.temperature = nn.Parameter(torch.tensor(1.0))
    dropout = reproducible.build_model("dropout")
    return errors_of(
        {
            "replicas": lambda: wrapped(dropout, zeroamp={"dp_replicate_size": 2}),
            "0-D parameter": lambda: wrapped(scaled),
            "batch norm": lambda: wrapped(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))),
            "LBFGS": lambda: trained(lambda model: torch.optim.LBFGS(model.parameters())),
            "Adafactor": lambda: trained(lambda model: torch.optim.Adafactor(model.parameters())),
            "fused": lambda: trained(lambda model: torch.optim.AdamW(model.parameters(), fused=True)),
            "some are divided": mixed,
            "divided sum": lambda: backward(trained(zeroamp={"reduce": "sum"})),
            "not divided in float16": lambda: backward(trained(mode="fp16"), divide=False),
        }
    )


def test_what_cannot_be_kept_is_refused_by_name(ranks2):
    texts = {
        "replicas": "^ConfigError: .*but replicas would be added last",
        "0-D parameter": "^WrapError: .*is a trainable 0-D parameter",
        "batch norm": "^WrapError: .*1 is a BatchNorm2d",
        "LBFGS": "^StepError: .*LBFGS",
        "Adafactor": "^StepError: .*Adafactor, which needs statistics of whole parameters",
        "fused": "^StepError: .*AdamW with fused=True and parameters on the CPU",
        "some are divided": "^StepError: .*divide=True for some micro-batches",
        "divided sum": '^StepError: .*divide=True with zeroamp.reproducible and zeroamp.reduce "sum"',
        "not divided in float16": "^StepError: .*divide=False in float16",
    }
    check_errors(ranks2.run(_refused), texts)
