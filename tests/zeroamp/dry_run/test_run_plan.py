"""`plan_run` and what it returns."""

import json

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.small import Llama, Moe, hf_llama_config
from tests.processes.training import config
from tests.zeroamp.dry_run.plans import FULL, TOKENS, plan, tokens
from zeroamp.dry_run.gpu_memory import RESERVED_BYTES
from zeroamp.dry_run.timeline import KINDS

FITS = (2_000_000 + RESERVED_BYTES) / 1e9
"""GB of a GPU into which some batches of the small model fit."""


@pytest.fixture(scope="module")
def run():
    return plan()


@pytest.fixture(scope="module")
def fitting():
    return plan(stages=(3,), gpu=FITS)


def test_all_stages_are_compared_and_checkpointing_keeps_less(run):
    assert [stage.stage for stage in run.stages] == [0, 1, 2, 3]
    shapes = [(stage.ranks.num_replicas, stage.ranks.num_shards) for stage in run.stages]
    assert shapes == [(8, 1), (None, 8), (None, 8), (None, 8)]
    peaks = [stage.memory.peak_bytes() for stage in run.stages]
    assert peaks[0] > peaks[1] == peaks[2] > peaks[3]
    other = plan(checkpointing=True, stages=(1, 3))  # stage 0 has its peak in the update
    for peak, with_it in zip(peaks[1::2], other.stages, strict=True):
        assert peak > with_it.memory.peak_bytes()


@pytest.mark.parametrize(
    ("accumulation", "names"),
    [(1, ["forward", "backward"]), (2, 2 * ["forward", "backward"]), (4, 3 * ["forward", "backward"])],
)
def test_what_a_page_draws_has_the_parts_in_order(accumulation, names):
    """What a page draws has the parts of the step in order and its peak."""
    memory = plan({"accumulation": accumulation}, stages=(3,)).stages[0].memory
    drawn = memory.drawn()
    assert [stretch["name"] for stretch in drawn["stretches"]] == [*names, "optimizer"]
    assert [stretch["begin"] for stretch in drawn["stretches"]] == [
        *(250 * index + begin for index in range(len(names) // 2) for begin in (0, 100)),
        125 * len(names),
    ]
    assert len(drawn["total"]) == 125 * len(names) + 100
    assert max(drawn["total"]) == memory.peak_bytes()
    assert [sum(values) for values in zip(*(kind["bytes"] for kind in drawn["kinds"]), strict=True)] == drawn["total"]


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not():
    run = plan(gpu=FITS, stages=(1, 3))
    assert [run.fits(stage) for stage in run.stages] == [True, True]
    for stage in run.stages:
        assert stage.largest_batch > 2
        for batch, fits in ((stage.largest_batch, True), (stage.largest_batch + 1, False)):
            at_batch = plan(gpu=FITS, stages=(stage.stage,), batch=batch)
            assert at_batch.fits(at_batch.stages[0]) is fits
    assert run.stages[0].largest_batch <= run.stages[1].largest_batch


def test_json_has_every_number_in_bytes(run):
    data = json.loads(json.dumps(run.to_dict(), allow_nan=False))
    assert [stage["stage"] for stage in data["stages"]] == [0, 1, 2, 3]
    last = data["stages"][3]
    assert set(last["memory"]["peak"]) == set(KINDS)
    assert sum(last["memory"]["peak"].values()) == last["peak_bytes"]


def test_text_says_what_is_planned_and_what_is_not(monkeypatch, run, fitting):
    """Text says what is planned and not counted in one unit and in the width of the terminal."""
    text = " ".join(str(fitting).split())
    assert "mode autocast, 8 ranks, 1 micro-batch of 2 samples of 12 tokens per rank, without activation" in text
    assert "expert" not in text
    assert "Fragmentation is not counted" in text
    assert "activations KiB" in text
    assert "1e-" not in text
    assert "0.000" not in text
    monkeypatch.setenv("COLUMNS", "90")
    assert max(map(len, str(run).splitlines())) <= 90


def test_offloaded_shards_are_not_on_the_device():
    on_cpu = {"device": "cpu"}
    options = {"zero_optimization": {"stage": 3, "offload_param": on_cpu, "offload_optimizer": on_cpu}}
    policy = zeroamp.policy_from_config({**config(3), **options})
    with torch.device("meta"):
        model = Llama(tied=False)
    run = zeroamp.plan_run(model, policy, world_size=8, seq=TOKENS, inputs=tokens, stages=(3,), gpu=FULL)
    stage = run.to_dict()["stages"][0]
    on_host = ("parameters", "optimizer state", "gradients")
    assert stage["peak_bytes"] == sum(value for kind, value in stage["memory"]["peak"].items() if kind not in on_host)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert stage["host_bytes"] >= 4 * 4 * numel // 8


def test_a_stage_that_the_config_excludes_is_refused_with_the_reason():
    run = plan({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})
    assert [stage.stage for stage in run.stages] == [3]
    assert sorted(run.refused) == [0, 1, 2]
    assert "zero_hpz_partition_size" in run.refused[1]
    assert "stage 1" in run.refused[1]
    assert "stage 1: not possible: " in str(run)


@pytest.mark.slow
def test_replicas():
    run = plan({"zeroamp": {"dp_replicate_size": 2}})
    assert [(stage.stage, stage.ranks.num_replicas, stage.ranks.num_shards) for stage in run.stages] == [
        (1, 2, 4), (2, 2, 4), (3, 2, 4)
    ]  # fmt: skip
    with pytest.raises(zeroamp.ConfigError, match="dp_replicate_size"):
        plan({"zeroamp": {"dp_replicate_size": 3}})


@pytest.mark.parametrize(
    ("name", "value"),
    [("world_size", 0), ("world_size", True), ("batch", 1.5), ("seq", 0), ("stages", (4,))],
)
def test_a_number_that_no_run_has_is_refused(name, value):
    with pytest.raises(zeroamp.ConfigError, match=rf"plan_run\({name}=\) must be") as raised:
        plan(inputs=lambda batch, seq: pytest.fail("traced"), **{name: value})
    assert repr(value) in str(raised.value)


def test_a_transformers_model_needs_no_inputs():
    """A transformers model needs no inputs and a batch of the config is the default."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(hf_llama_config())
    run = plan({"train_micro_batch_size_per_gpu": 3}, model, inputs=None, batch=None, stages=(3,))
    assert run.stages[0].memory.peak_bytes() > 0
    assert run.batch == 3


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        (Moe, {}, "Moe .* DynamicOutputShapeException.* Check the inputs"),
        (lambda: Llama(tied=False), {"inputs": None}, "Llama.* inputs=function"),
        (lambda: Llama(tied=False), {"gpu": "h1000"}, "gpu .*a100-40gb, a100, h100.*memory of another GPU.*'h1000'"),
        (lambda: Llama(tied=False), {"gpu": 0}, "gpu .*memory of another GPU in GB.* 0"),
        (Returns, {"inputs": lambda batch, seq: torch.ones(batch, 8)}, r"Returns.* shape \(2, 8\).* loss_fn"),
        (lambda: Llama(tied=False), {"inputs": lambda batch, seq: 5}, "example_inputs.* a int"),
    ],
)
def test_what_cannot_be_planned_is_an_error_that_says_why(model, more, words):
    with torch.device("meta"):
        built = model()
    wrap = {"Linear"} if model is Returns else None
    with pytest.raises(zeroamp.ConfigError, match=words):
        plan(model=built, auto_wrap_policy=wrap, **more)


def test_the_model_is_left_as_it_was():
    torch.manual_seed(0)
    model = Llama(tied=True)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    modules, state = list(model.modules()), torch.get_rng_state()
    plan(model=model, stages=(3,), checkpointing=True)
    assert list(model.modules()) == modules
    for module in modules:
        assert "forward" not in vars(module)
        assert (*module._forward_hooks, *module._forward_pre_hooks) == ()
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None


def test_a_run_that_does_not_fit_says_what_to_change(run, fitting):
    assert "Nothing fits" not in str(fitting)
    assert "Nothing fits. Plan again with activation checkpointing" in " ".join(str(run).split())
