"""In modes bf16 and fp16 all units take floating-point inputs in the mode's dtype, as under FSDP2's own policy."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, build
from tests.oracles import plain_fsdp2
from tests.processes.training import same_bits, train
from tests.selection import slow_but

MODES = {
    "bf16": ({"bf16": {"enabled": True}}, torch.bfloat16, 1.0),
    "fp16": ({"fp16": {"enabled": True, "loss_scale": 64}}, torch.float16, 64.0),
}
NAME = "makes_fp32"
NUM_STEPS = 2


def losses_of(model):
    """The losses of this rank, one per optimizer step."""
    for index in range(NUM_STEPS):
        yield model(batch("llama", index * 2 + dist.get_rank()))


def config(mode, stage, keep="auto", **more):
    return {
        **MODES[mode][0],
        "zero_optimization": {"stage": stage, **more},
        "data_types": {"keep_in_fp32_modules": keep},
    }


def wrapped(mode, stage=3, **options):
    return zeroamp.wrap_model(build(NAME), zeroamp.policy_from_config(config(mode, stage, **options)))


def _all_stages(mode):
    runs = [train(NAME, {**config(mode, stage), "gradient_accumulation_steps": 1}, NUM_STEPS) for stage in (0, 1, 2, 3)]
    units = zeroamp.explain(wrapped(mode)).plan.units
    _, dtype, scale = MODES[mode]
    return runs, plain_fsdp2.train(build(NAME), units, losses_of, world_size=2, param_dtype=dtype, loss_scale=scale)


@pytest.mark.parametrize("mode", slow_but(MODES, "bf16"))
def test_every_stage_trains_as_fsdp2_alone_does(ranks2, mode):
    for runs, (losses, parameters) in ranks2.run(_all_stages, mode):
        for run in runs:
            assert [loss for (loss,) in run.losses] == losses
            assert same_bits(run.parameters, parameters) == []


LOW, FP32 = torch.bfloat16, torch.float32


def _seen(keep):
    """Return the dtypes that each block has seen, those that the plan promises, and what a table loses by bf16."""
    model = wrapped("bf16", keep=keep)
    forward = model.blocks[1].forward

    def spied(x, *, tables):
        spied.table = tables["cos"]
        return forward(x, tables=tables)

    model.blocks[1].forward = spied
    model(batch("llama", 0)).backward()
    plan = zeroamp.explain(model).plan
    promised = [plan.input_dtype(fqn) for fqn in ("", "blocks.0", "blocks.1")]
    return [set(block.seen) for block in model.blocks], promised, bool((spied.table.bfloat16() != spied.table).any())


@pytest.mark.parametrize(
    ("keep", "dtype", "promised"),
    [("auto", LOW, LOW), (["blocks.1"], FP32, None)],
    ids=["no region", "a region"],
)
def test_units_take_inputs_in_the_modes_dtype(ranks2, keep, dtype, promised):
    """Units take floating point inputs in the mode's dtype and regions take fp32 uncast."""
    seen, of_plan, is_fp32 = ranks2.run(_seen, keep)[0]
    assert seen == [{(LOW, LOW, torch.int64)}, {(dtype, dtype, torch.int64)}]
    assert of_plan == [LOW, LOW, promised]
    assert is_fp32 is (dtype == FP32)


def test_a_unit_kept_in_fp32_takes_the_modes_dtype():
    """A unit of parameters that are kept in fp32 takes its inputs in the mode's dtype."""
    cfg = config("bf16", 3, ["blocks.0.*.weight", "blocks.0.*.bias"])
    plan = zeroamp.build_plan(build(NAME), cfg)
    assert plan.input_dtype("blocks.0") == LOW
    assert {p.dtypes.param for p in plan.params if p.fqn.startswith("blocks.0")} == {FP32}


def _of_registered_method():
    model = wrapped("bf16")
    model.embedded = lambda x: x.dtype
    zeroamp.register_forward_method(model, "embedded")
    return model.embedded(torch.ones(2))


def test_a_registered_method_takes_its_inputs_as_the_forward_does(ranks2):
    assert ranks2.run(_of_registered_method) == [LOW, LOW]
