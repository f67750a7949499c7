"""`plan_run` and what it returns."""

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.small import Llama, Moe, hf_llama_config
from tests.processes.training import config
from tests.zeroamp.dry_run.plans import FULL, TOKENS, plan, tokens
from zeroamp.dry_run.meshes import shapes_to_try
from zeroamp.dry_run.planned_traffic import plan_traffic
from zeroamp.dry_run.step_time import step_time
from zeroamp.dry_run.timeline import KINDS
from zeroamp.planning.mesh import Ranks


@pytest.fixture(scope="module")
def run():
    return plan()


def test_all_stages_are_compared(run):
    assert [stage.stage for stage in run.stages] == [0, 1, 2, 3]
    shapes = [(stage.ranks.num_replicas, stage.ranks.num_shards) for stage in run.stages]
    assert shapes == [(8, 1), (None, 8), (None, 8), (None, 8)]
    peaks = [stage.memory.peak_bytes() for stage in run.stages]
    assert peaks[0] > peaks[1] == peaks[2] > peaks[3]


def test_checkpointing_keeps_less(run):
    other = plan(checkpointing=True)
    for without, with_it in list(zip(run.stages, other.stages, strict=True))[1:]:  # stage 0 has its peak in the update
        assert without.memory.peak_bytes() > with_it.memory.peak_bytes()
        assert without.other_memory.peak_bytes() == with_it.memory.peak_bytes()
        assert with_it.other_memory.peak_bytes() == without.memory.peak_bytes()
        assert with_it.time.flops > without.time.flops
    assert run.activations == other.activations
    kept, less = run.activations["blocks.2"]
    # A unit keeps its input; and here the input of the next, which is its output, is the next one's own.
    assert less == 2 * TOKENS * 32 * 4 < kept


def test_the_largest_batch_fits_and_the_next_does_not():
    nccl_gb = 1.06 + 7 * 32 * 14 * 2**20 / 1e9  # all-to-alls between eight ranks of a node
    gpu = replace(zeroamp.GPUS["h100"], memory_gb=4e-3 + nccl_gb)
    run = plan(gpu=gpu, stages=(1, 3))
    assert [stage.nccl_bytes for stage in run.stages] == [round(1e9 * nccl_gb)] * 2
    assert [run.fits(stage) for stage in run.stages] == [True, True]
    for stage in run.stages:
        assert stage.largest_batch > 2
        for batch, fits in ((stage.largest_batch, True), (stage.largest_batch + 1, False)):
            at_batch = plan(gpu=gpu, stages=(stage.stage,), batch=batch)
            assert at_batch.fits(at_batch.stages[0]) is fits
    assert run.stages[0].largest_batch <= run.stages[1].largest_batch


def test_traffic_is_that_of_the_plan(run):
    for stage in run.stages:
        planned = plan_traffic(stage.plan, stage.ranks)
        assert (stage.traffic.calls, stage.traffic.num_bytes) == (planned.calls, planned.num_bytes)


def test_json_has_every_number_in_bytes_and_seconds(run):
    data = json.loads(json.dumps(run.to_dict(), allow_nan=False))
    assert [stage["stage"] for stage in data["stages"]] == [0, 1, 2, 3]
    last = data["stages"][3]
    assert set(last["memory"]["peak"]) == set(KINDS)
    assert sum(last["memory"]["peak"].values()) == last["peak_bytes"]
    assert last["memory"]["init"]["parameters"] == sum(group["stored_bytes_per_rank"] for group in last["groups"])
    assert data["activation_bytes"]["blocks.2"] == dict(
        zip(("kept", "checkpointed"), run.activations["blocks.2"], strict=True)
    )
    assert last["seconds"]["total"] == pytest.approx(
        sum(last["seconds"][part] for part in ("compute", "optimizer", "exposed_communication"))
    )


def test_text_has_a_row_per_stage_and_says_what_is_not_counted(run):
    text = " ".join(str(plan({"threshold": None}, stages=(3,))).split())
    assert "mode autocast, 8 ranks, 1 x batch 2 x 12 per rank, without activation checkpointing" in text
    assert "blocks.0 … blocks.5" in text
    assert "Fragmentation is not counted" in text


def test_no_line_is_wider_than_the_terminal(monkeypatch, run):
    monkeypatch.setenv("COLUMNS", "90")
    assert max(map(len, str(run).splitlines())) <= 90
    assert next(line.split() for line in str(run).splitlines() if line.startswith("stage ")) == ["stage", *"0123"]


def test_scalar_parameters_have_a_row():
    policy = zeroamp.policy_from_config(config(3))
    with torch.device("meta"):
        model = Llama(tied=False, num_blocks=2)
        model.logit_scale = nn.Parameter(torch.empty(()))
    run = zeroamp.plan_run(model, policy, world_size=8, seq=TOKENS, inputs=tokens, stages=(3,), gpu=FULL)
    assert "replicated" in str(run).split()


def test_offloaded_shards_are_not_on_the_device():
    on_cpu = {"device": "cpu"}
    options = {"zero_optimization": {"stage": 3, "offload_param": on_cpu, "offload_optimizer": on_cpu}}
    policy = zeroamp.policy_from_config({**config(3), **options})
    with torch.device("meta"):
        model = Llama(tied=False, num_blocks=6)
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


def test_a_mesh():
    run = plan(mesh=(2, 4))
    shapes = [(stage.ranks.num_replicas, stage.ranks.num_shards) for stage in run.stages]
    assert shapes == [(8, 1), (2, 4), (2, 4), (2, 4)]
    with pytest.raises(zeroamp.ConfigError, match="mesh .* 8 ranks.* 2x3"):
        plan(mesh=(2, 3))


def test_a_transformers_model_needs_no_inputs():
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(hf_llama_config())
    assert plan(model=model, inputs=None, stages=(3,)).stages[0].memory.peak_bytes() > 0


def test_a_batch_of_the_config_is_the_default():
    options = {"train_micro_batch_size_per_gpu": 3}
    assert plan(options, batch=None, stages=(3,)).batch == 3


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
        (lambda: Llama(tied=False), {"gpu": "h1000"}, "gpu .*a100-40gb, a100, h100.*'h1000'"),
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
    model = Llama(tied=True, num_blocks=6)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    modules, state = list(model.modules()), torch.get_rng_state()
    plan(model=model, stages=(3,), checkpointing=True)
    assert list(model.modules()) == modules
    assert all("forward" not in vars(module) for module in modules)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None


def _time(ranks=8, **more):
    run = plan({"gradient_accumulation_steps": 1}, stages=(3,), world_size=ranks, **more)
    return run.stages[0].time


@pytest.mark.slow
def test_one_rank_waits_for_nothing():
    assert _time(ranks=1).exposed == _time(ranks=1).communication == 0


def test_slow_links_are_waited_for_and_fast_ones_hide_behind_the_ops():
    slow, half, fast = (_time(intra_gb_per_s=speed) for speed in (1e-3, 5e-4, 1e9))
    assert slow.compute == pytest.approx(fast.compute)
    assert half.communication - half.latency == pytest.approx(2 * (slow.communication - slow.latency))
    assert half.latency == slow.latency > 0
    # Of a step that is all communication, what is exposed is all but what the ops take.
    assert slow.total == pytest.approx(slow.communication + slow.optimizer, rel=1e-3)
    assert fast.communication == pytest.approx(fast.latency, rel=1e-3)
    assert fast.exposed <= fast.communication + fast.sums


def test_the_flops_are_those_of_torch_s_counter():
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    model = Returns()
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(2, 8)).sum().backward()
    run = plan(model=Returns(), stages=(3,), inputs=lambda batch, seq: torch.ones(batch, 8), loss_fn=torch.sum,
               auto_wrap_policy={"Linear"})  # fmt: skip
    assert run.stages[0].time.flops == counter.get_total_flops()


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 48, bias=False)

    def forward(self, x):
        queries, keys, values = self.linear(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True).float().sum()


def test_attention_counts_two_products_forward_and_five_backward_causal_or_not():
    run = plan(
        model=Attends(),
        stages=(3,),
        inputs=lambda batch, seq: torch.ones(batch, seq, 16),
        auto_wrap_policy={"Linear"},
    )
    product = 2 * (2 * 2 * TOKENS * TOKENS * 8)  # 2 x (batch x heads x queries x keys x width)
    of_linear = 2 * (2 * TOKENS * 16 * 48) * 2  # forward, and the weight's gradient: the input needs none
    assert run.stages[0].time.flops == 7 * product + of_linear


@pytest.mark.slow
def test_a_window_takes_as_long_as_its_micro_batches():
    times = [plan({"accumulation": steps}, stages=(3,)).stages[0].time for steps in (3, 4, 8)]
    middle = times[1].total - times[0].total
    assert times[2].total - times[1].total == pytest.approx(4 * middle)
    assert times[2].flops == 2 * times[1].flops


def test_other_gpus_take_other_times(run):
    stage = run.stages[3]
    efficiency = zeroamp.Efficiency(compute=1, memory=1, network=1)
    assert isinstance(stage.ranks, Ranks)
    times = [
        step_time(stage.plan, stage.ranks, [], 8 * 10**9, gpu=gpu, network=run.network, efficiency=efficiency)
        for gpu in zeroamp.GPUS.values()
    ]
    assert [time.optimizer for time in times] == [8 / gpu.memory_gb_per_s for gpu in zeroamp.GPUS.values()]


SMALL = replace(zeroamp.GPUS["h100"], memory_gb=5.4)
"""Every mesh of the small model fits on it, beside what NCCL takes."""


@functools.cache
def _meshes(**options):
    return plan(world_size=64, stages=(3,), **options).meshes


def test_meshes_are_tried_from_one_node_on_and_a_partition_too():
    advice = _meshes(gpu=SMALL)
    assert [str(mesh.shape) for mesh in advice.tried] == ["8x8", "4x16", "2x32", "1x64", "1x64 hpZ 8"]
    assert [mesh.fits for mesh in advice.tried] == [True] * 4 + [False], "hpZ: a communicator for each unit"
    # Of a model of kilobytes a step is latency: the rings inside a node are the fastest.
    assert str(advice.best.shape) == "8x8"
    assert advice.best.time.total == min(mesh.time.total for mesh in advice.tried)
    assert "one replica (1x64)" in advice.reason
    assert "latency" in advice.reason


def test_each_mesh_is_what_a_plan_of_that_mesh_says():
    for mesh in (_meshes().tried[0], _meshes().tried[3]):
        shape = (mesh.shape.num_replicas, mesh.shape.num_shards)
        alone = plan(world_size=64, stages=(3,), mesh=shape if shape[0] > 1 else None).stages[0]
        # The optimizer's part is scaled, with its counters of steps, which matter in a model of kilobytes only.
        assert mesh.peak_bytes - alone.nccl_bytes == pytest.approx(alone.memory.peak_bytes(), rel=5e-3)
        assert mesh.time.communication == alone.time.communication
        assert mesh.time.total == pytest.approx(alone.time.total, rel=1e-3)
    zero = {"stage": 3, "zero_hpz_partition_size": 8, "stage3_param_persistence_threshold": 0}
    partition = plan({"zero_optimization": zero}, world_size=64, stages=(3,)).stages[0]
    assert _meshes().tried[4].time.communication == partition.time.communication


def test_the_best_mesh_fits_although_another_is_faster():
    peaks = [mesh.peak_bytes for mesh in _meshes(gpu=SMALL).tried]
    gpu = replace(zeroamp.GPUS["h100"], memory_gb=(peaks[0] - 1) / 1e9)
    advice = _meshes(gpu=gpu)
    assert not advice.tried[0].fits
    assert advice.best.fits
    assert "too large for the GPU: 8x8" in advice.reason


def test_where_no_mesh_fits_the_one_with_the_least_memory_is_named():
    advice = _meshes()  # on a GPU of a kilobyte
    assert advice.best.peak_bytes == min(mesh.peak_bytes for mesh in advice.tried)
    assert advice.reason.startswith("no mesh fits")


def test_one_node_has_no_meshes_to_try_and_stage_0_neither():
    assert plan(stages=(3,)).meshes is None
    assert plan({"stage": 0}, world_size=64, stages=(0,)).meshes is None


def test_shapes_to_try_with_levels_and_with_a_number_of_nodes_that_is_no_power_of_two():
    shapes = [str(shape) for shape in shapes_to_try(24, 8, with_partition=False, with_levels=True)]
    assert shapes == ["3x8", "1x24", "1x24 two levels"]
    assert list(shapes_to_try(20, 8, with_partition=True)) == []


@pytest.mark.slow
def test_reductions_on_their_own_communicator_let_gathers_pass():
    """Slow links: gathers of the backward do not wait for reductions that were started before."""
    one, two = (
        plan({"zeroamp": {"separate_reduce_scatter_group": separate}}, stages=(3,), intra_gb_per_s=1, batch=1).stages[0]
        for separate in (False, True)
    )
    assert two.time.communication == one.time.communication
    assert two.time.exposed < one.time.exposed
    assert two.nccl_bytes - one.nccl_bytes == 500_000_000


@pytest.mark.slow
def test_of_equally_fast_meshes_the_smallest_without_long_rings_is_the_best():
    """On a GPU so slow that all latency hides."""
    gpu = replace(zeroamp.GPUS["h100"], low_tflops=1e-9, fp32_tflops=1e-9, tf32_tflops=1e-9)
    advice = plan(world_size=4096, stages=(3,), gpu=gpu, batch=1).meshes
    times = [mesh.time.total for mesh in advice.tried]
    assert max(times) < 1.004 * min(times)
    assert advice.best.shape.num_shards <= 1024
    short = [mesh for mesh in advice.tried if mesh.shape.num_shards <= 1024]
    assert advice.best.peak_bytes == min(mesh.peak_bytes for mesh in short)
