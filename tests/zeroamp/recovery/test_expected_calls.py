"""The collectives that are expected of a first step and a first evaluation are those issued, in that order."""

import pytest
import torch

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.training import config, wrapped
from tests.selection import slow_but
from zeroamp.recovery.expected_calls import expected_calls_of_evaluation, expected_calls_of_step
from zeroamp.wrapping.state import wrap_state

FP16 = {"dtype": None, "fp16": {"enabled": True, "initial_scale_power": 4}}
NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}


def _expected_and_issued(name, options, more):
    """Return [(expected, issued)] of an evaluation and of a step, as text. Compares process groups and ops itself."""
    model = wrapped(name, config(**_with_recovery(options)), **more)
    state = wrap_state(model)
    expected = [
        expected_calls_of_evaluation(state.plan, state.mesh),
        expected_calls_of_step(state.plan, model, state.mesh),
    ]
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with torch.no_grad():
        loss_of(model, batch(name, 0))
    for _ in range(options.get("accumulation", 1)):
        step.backward(loss_of(model, batch(name, 0)))
        step.step()
    issued = [step.recovery.calls.last_evaluation, step.recovery.calls.last_step]
    texts = _texts(*zip(expected, issued, strict=True))
    assert expected[1] is None or expected == issued, texts
    return texts


def _with_recovery(options):
    return {**options, "zeroamp": {"recovery": True, **options.get("zeroamp", {})}}


def _texts(*pairs):
    return [([str(call) for call in ours or []], [str(call) for call in theirs]) for ours, theirs in pairs]


def check(answers):
    for (expected, issued), (expected_of_step, issued_in_step) in answers:
        assert expected == issued
        assert expected_of_step == issued_in_step
        assert len(issued_in_step) > 3


@pytest.mark.parametrize("name", slow_but(["llama_tied", "hf_llama"], "llama_tied"))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_models_at_every_stage(ranks2, name, stage):
    for threshold in (None, 0):
        options = {"stage": stage, "accumulation": 2, "threshold": threshold}
        check(ranks2.run(_expected_and_issued, name, options, {}))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_own_units(ranks2, accumulation):
    options = {"stage": 3, "accumulation": accumulation, "threshold": 1000}
    check(ranks2.run(_expected_and_issued, "llama_untied", options, {}))


def test_experts(ranks2):
    check(ranks2.run(_expected_and_issued, "moe", {"stage": 3}, {}))


@pytest.mark.parametrize("options", [FP16, {**FP16, **NATIVE}, NATIVE, {"comm": "fp32"}], ids=str)
def test_every_wire(ranks2, options):
    check(ranks2.run(_expected_and_issued, "llama_tied", {"stage": 2, **options}, {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"mesh_shape": (2, 2)},
        {"mesh_shape": (1, 4)},
        {"fields": {"prefetch_bucket_size": 20_000}},
        {"fields": {"reduce_bucket_size": 20_000}},
    ],
    ids=str,
)
def test_meshes_and_sharding_options(ranks4, more):
    check(ranks4.run(_expected_and_issued, "llama_untied", {"stage": 3, "accumulation": 2}, more))


def _share_between_blocks(model):
    model.blocks[0].down.weight = model.blocks[1].down.weight


def test_nothing_is_expected_of_a_step_with_several_groups_at_the_root(ranks2):
    # Beside the root's own: the weight that blocks share, and the model-wide group. The module tree orders them.
    more = {"prepare_before": _share_between_blocks}
    _, (expected, issued) = ranks2.run(_expected_and_issued, "llama_untied", {"stage": 3}, more)[0]
    assert expected == []
    assert {call.split(" for ")[1] for call in issued} >= {"root:bf16 (shared by inner units)", "model-wide:fp32"}


def test_nothing_is_expected_where_it_is_not_known(ranks2, ranks4):
    assert ranks2.run(_expected_and_issued, "conv", {"stage": 3}, {})[0][1][0] == []
    more = {"fields": {"hpz_partition_size": 2}}
    assert ranks4.run(_expected_and_issued, "llama_tied", {"stage": 3}, more)[0][1][0] == []
    assert build("conv").scale.requires_grad, "which the model owns beside its stages"


def _ops_of_the_all_reduces(options, mesh_shape):
    model = wrapped("llama_tied", config(**_with_recovery(options)), mesh_shape=mesh_shape)
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.01))
    ops, all_reduce = [], torch.distributed.all_reduce

    def note(tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        ops.append(str(op))
        return all_reduce(tensor, op, group, async_op)

    torch.distributed.all_reduce = note
    try:
        for _ in range(options.get("accumulation", 1)):
            step.backward(loss_of(model, batch("llama_tied", 0)))
            step.step()
    finally:
        torch.distributed.all_reduce = all_reduce
    logged = [str(call.op) for call in step.recovery.calls.last_step if call.collective == "all_reduce"]
    return logged, ops[:-1]


@pytest.mark.parametrize("mesh_shape", [None, (2, 1)])
@pytest.mark.parametrize("more", [{}, {**FP16, "accumulation": 2, "data_types": {"grad_accum_dtype": "fp16"}}], ids=str)
def test_the_logged_op_of_the_all_reduce_is_fsdp2s(ranks2, mesh_shape, more):
    native = {"zeroamp": {"reduce_accumulate_dtype": "native"}, "comm": "fp32"}
    options = {"stage": 0 if mesh_shape is None else 1, **more, **native}
    logged, issued = ranks2.run(_ops_of_the_all_reduces, options, mesh_shape)[0]
    assert logged == issued != []
