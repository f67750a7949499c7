"""Reductions of sums of several micro-batches: they are sent in fp32, because such sums are not exact in bf16.

The oracle is one process in plain torch: each rank adds its micro-batches in fp32, then the ranks are averaged.
"""

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import zeroamp
from tests.measuring.traffic import planned_and_counted
from tests.models.small import batch, loss_of
from tests.oracles import one_process
from tests.processes.training import SmallTraining, config, full_parameters, mesh_of, same_bits
from tests.selection import slow_but

WIDTH, NUM_STEPS, NUM_MICRO = 16, 2, 3
NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}
MODES = {
    "autocast": {},
    "bf16": {"dtype": None, "bf16": {"enabled": True}},
}


class Block(nn.Module):
    """A unit with two branches, which run as the caller decides. Without both it uses no parameter."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, num_branches):
        if num_branches == 0:
            return x.clone()
        y = self.always(x)
        if num_branches > 1:
            y = y + self.sometimes(x)
        return x + self.norm(y)


class Routed(nn.Module):
    """Units that run, and parameters that are used, as `route` says: the names of what is left out."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x, route):
        for number, block in enumerate(self.blocks):
            if f"block {number}" not in route:
                x = block(x, 0 if f"idle {number}" in route else 2 - (f"branch {number}" in route))
        return self.head(x).float().square().mean()


def _everything(model, micro, rank):
    return ()


def _unused_in_the_last(model, micro, rank):
    return ("branch 0", "block 1") if micro + 1 == NUM_MICRO else ()


def _first_used_in_the_last(model, micro, rank):
    return () if micro + 1 == NUM_MICRO else ("branch 0", "branch 2")


def _another_on_each_rank(model, micro, rank):
    """Before the last micro-batch, the first rank uses other units than the others. Only some ranks have their sums."""
    return () if micro + 1 == NUM_MICRO else (f"idle {1 + (rank == 0)}", "branch 0")


def _unfrozen_in_between(model, micro, rank):
    for fqn, parameter in model.named_parameters():
        if "always" in fqn:
            parameter.requires_grad_(micro > 0)
    return ()


ROUTES = (_everything, _unused_in_the_last, _first_used_in_the_last, _another_on_each_rank, _unfrozen_in_between)


def _routed():
    torch.manual_seed(0)
    return Routed()


def _inputs(step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(4, WIDTH, generator=generator)


def _expected(route, mode, world_size, num_replicas):
    """Return (losses[rank], gradients[step], parameters) in plain torch."""
    model = _routed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, all_gradients = [[] for _ in range(world_size)], []
    for step in range(NUM_STEPS):
        table = []
        for rank in range(world_size):
            table.append([])
            for micro in range(NUM_MICRO):
                used = route(model, micro, rank)
                run = copy.deepcopy(model).to(torch.bfloat16) if mode == "bf16" else model
                run.zero_grad()
                x = _inputs(step, micro, rank)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
                    loss = run(x.to(torch.bfloat16) if mode == "bf16" else x, used)
                (loss / NUM_MICRO).backward()
                losses[rank].append(float(loss.detach()))
                table[-1].append([None if p.grad is None else p.grad.clone() for p in run.parameters()])
        gradients = {}
        for at, (fqn, parameter) in enumerate(model.named_parameters()):
            of_parameter = [[micro[at] for micro in micros] for micros in table]
            parameter.grad = gradients[fqn] = one_process.combine(of_parameter, False, num_replicas)
        all_gradients.append({fqn: gradient.clone() for fqn, gradient in gradients.items() if gradient is not None})
        optimizer.step()
    return losses, all_gradients, {fqn: p.detach() for fqn, p in model.named_parameters()}


def _plain_loop(model, route):
    """Return (losses, gradients[step], parameters) of a plain loop that reduces in the last micro-batch only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, losses, all_gradients = dist.get_rank(), [], []

    def note(*_):
        found = {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}
        all_gradients.append({fqn: g.full_tensor() if isinstance(g, DTensor) else g for fqn, g in found.items()})

    optimizer.register_step_pre_hook(note)
    for step in range(NUM_STEPS):
        for micro in range(NUM_MICRO):
            used = route(model, micro, rank)
            model.set_requires_gradient_sync(micro + 1 == NUM_MICRO)
            loss = model(_inputs(step, micro, rank), used)
            losses.append(float(loss.detach()))
            (loss / NUM_MICRO).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, all_gradients, full_parameters(model)


def _loops(stages, route, options, mesh_shape):
    found = []
    for stage in stages:
        policy = zeroamp.policy_from_config(config(stage, threshold=0, **options))
        found.append(_plain_loop(zeroamp.wrap_model(_routed(), policy, mesh_of(mesh_shape), {"Block"}), route))
    return found


def _check_loops(ranks, world_size, stages, route, mode, options, mesh_shape=None):
    losses, gradients, parameters = _expected(route, mode, world_size, mesh_shape[0] if mesh_shape else 1)
    for rank, by_stage in enumerate(ranks.run(_loops, stages, route, {**MODES[mode], **options}, mesh_shape)):
        for stage, (own_losses, own_gradients, own_parameters) in zip(stages, by_stage, strict=True):
            assert own_losses == losses[rank], stage
            assert [same_bits(*pair) for pair in zip(own_gradients, gradients, strict=True)] == [[]] * NUM_STEPS, stage
            assert same_bits(own_parameters, parameters) == [], stage


FAST = {
    ("autocast", _unfrozen_in_between): (0, 3),
    ("autocast", _another_on_each_rank): (1, 3),
    ("bf16", _unused_in_the_last): (0, 3),
}
"""Case -> stages. The others run at stages 0, 1 and 3."""


@pytest.mark.parametrize(
    "case", slow_but([*product(MODES, ROUTES)], *FAST), ids=lambda case: f"{case[0]}, {case[1].__name__}"
)
def test_a_plain_loop_that_reduces_once_equals_one_process(ranks2, case):
    mode, route = case
    _check_loops(ranks2, 2, FAST.get(case, (0, 1, 3)), route, mode, {})


def test_native_sums_of_micro_batches_are_sent_in_fp32(ranks2):
    """A sum of two fp32 numbers has one order, so the backend's sum has the bits of the tree."""
    _check_loops(ranks2, 2, (1, 3), _everything, "autocast", NATIVE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "options"), [(_everything, NATIVE), (_unused_in_the_last, {}), (_another_on_each_rank, {})]
)
def test_replicas_of_shards_equal_one_process(ranks4, route, options):
    _check_loops(ranks4, 4, (1, 2, 3), route, "autocast", options, (2, 2))


def _reductions(traffic):
    """Return {dtype: bytes} of the reductions over shards."""
    found = {}
    for key, num_bytes in traffic.num_bytes.items():
        if key.collective in ("all_to_all", "reduce_scatter"):
            found[key.dtype] = found.get(key.dtype, 0) + num_bytes
    return found


def _traffic_of(options):
    """Compare the planned step with a run, and return dtypes of the ledger, of a verified step, and reductions."""
    training = SmallTraining(config(**options))
    planned, counted = planned_and_counted(training.model, batch("two_blocks", 0))
    assert planned == counted
    ledger = zeroamp.explain(training.model)
    seen = ledger.verify(training.model, batch("two_blocks", 0), loss_fn=lambda output: output.float().sum())
    assert seen.is_traffic_as_planned
    expected = {row["communication"] for row in ledger.group_rows() if row["param"] == "bf16"}
    assert {dtype for row in seen.to_dict()["groups"] if row["expected"]["param"] == "bf16"
            for dtype in row["observed"]["communication"]} == expected  # fmt: skip
    return expected, _reductions(seen.counted)


OVERRIDDEN = {"zeroamp": {"overrides": [{"modules": "blocks.0.qkv", "communication": "bf16"}]}}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stage": 1, "accumulation": 2}, ["fp32"]),
        ({"stage": 2, "accumulation": 2}, ["bf16"]),
        ({"stage": 1, "accumulation": 2, "comm": "bf16"}, ["bf16"]),
        ({"stage": 1, "accumulation": 2, **OVERRIDDEN}, ["bf16", "fp32"]),
        ({"stage": 1, "accumulation": 2, "data_types": {"grad_accum_dtype": "bf16"}}, ["bf16"]),
        ({"stage": 1, "accumulation": 2, **NATIVE}, ["fp32"]),
    ],
    ids=str,
)
def test_plan_ledger_and_run_have_the_same_dtypes(ranks2, options, expected):
    for found, _ in ranks2.run(_traffic_of, options):
        assert sorted(found) == expected


def _sent_by_steps(counts, stage, options):
    """Return the bytes of reductions by dtype in steps of so many micro-batches, of `TrainStep` and of plain loops."""
    training = SmallTraining(config(stage, threshold=10**6, **options))
    traffic, found = zeroamp.traffic(training.model), []
    for count in counts:
        traffic.reset()
        for micro in range(count):
            training.backward(micro, divide=False, is_last=micro + 1 == count)
        training.train.step()
        found.append(_reductions(traffic))
    if stage < 2:
        return found
    found, model = [], SmallTraining(config(stage, threshold=10**6, **options)).model
    for count in counts:
        zeroamp.traffic(model).reset()
        for micro in range(count):
            model.set_requires_gradient_sync(micro + 1 == count)
            loss_of(model, batch("two_blocks", micro)).backward()
        found.append(_reductions(zeroamp.traffic(model)))
        model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("stage", "options", "factor"),
    [(1, {}, 2), (3, {}, 2), (3, {"comm": "bf16"}, 1)],
    ids=["default, stage 1", "default, stage 3", "written"],
)
def test_only_steps_of_several_micro_batches_send_fp32(ranks2, stage, options, factor):
    """One micro-batch is sent in bf16, also after a step with several. A communication dtype that is written holds."""
    for first, of_sums, last in ranks2.run(_sent_by_steps, (1, 3, 1), stage, options):
        assert first == last
        low, others = first[torch.bfloat16], first[torch.float32]
        if factor == 1:
            assert of_sums == first
        else:
            assert of_sums == {torch.float32: others + factor * low}


def _sum_of_fsdp2_alone(reduce_dtype):
    """Return the gradient of micro-batches that FSDP2 with bf16 weights reduces once, and that of one process."""
    torch.manual_seed(0)
    model, rank, world_size = nn.Linear(WIDTH, WIDTH, bias=False), dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(world_size, NUM_MICRO, 4, WIDTH).to(torch.bfloat16)
    low = model.weight.detach().to(torch.bfloat16).requires_grad_()
    gradients = [
        [torch.autograd.grad((x @ low.T).float().square().mean(), low)[0] for x in of_rank] for of_rank in inputs
    ]
    right = one_process.combine(gradients, False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
    for micro in range(NUM_MICRO):
        model.set_requires_gradient_sync(micro + 1 == NUM_MICRO)
        model(inputs[rank, micro]).float().square().mean().backward()
    return model.weight.grad.full_tensor(), right


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
def test_fsdp2_alone_rounds_sums_to_its_reduce_dtype(ranks2, reduce_dtype):
    for found, right in ranks2.run(_sum_of_fsdp2_alone, reduce_dtype):
        assert torch.equal(found, right) == (reduce_dtype == torch.float32)
