"""In modes bf16 and fp16 all units take floating-point inputs in the mode's dtype, as under FSDP2's own policy."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models import small
from tests.models.architectures import vit
from tests.models.small import MakesFp32, batch
from tests.oracles import plain_fsdp2
from tests.processes.training import full_parameters, same_bits
from tests.selection import slow_but

MODES = {
    "bf16": ({"bf16": {"enabled": True}}, torch.bfloat16, 1.0),
    "fp16": ({"fp16": {"enabled": True, "loss_scale": 64}}, torch.float16, 64.0),
}
NUM_STEPS = 3


def build(name):
    torch.manual_seed(0)
    return vit()[0] if name == "vit" else small.build(name)


def losses_of(model):
    """The losses of this rank, one per optimizer step."""
    for index in range(NUM_STEPS):
        number = index * 2 + dist.get_rank()
        if isinstance(model, MakesFp32):
            yield model(batch("llama", number))
        else:
            images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(number))
            yield model(images, labels=torch.tensor([0, 1])).loss


def config(mode, stage, keep="auto", **more):
    return {
        **MODES[mode][0],
        "zero_optimization": {"stage": stage, **more},
        "data_types": {"keep_in_fp32_modules": keep},
    }


def wrapped(name, mode, stage=3, **options):
    return zeroamp.wrap_model(build(name), zeroamp.policy_from_config(config(mode, stage, **options)))


def _all_stages(name, mode):
    runs = {}
    for stage in (0, 1, 2, 3):
        model = wrapped(name, mode, stage)
        step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
        losses = []
        for loss in losses_of(model):
            losses.append(float(loss.detach()))
            step.backward(loss)
            step.step()
        runs[stage] = losses, full_parameters(model)
    units = zeroamp.explain(model).plan.units
    _, dtype, scale = MODES[mode]
    return runs, plain_fsdp2.train(build(name), units, losses_of, world_size=2, param_dtype=dtype, loss_scale=scale)


@pytest.mark.parametrize("mode", slow_but(MODES, "bf16"))
@pytest.mark.parametrize("name", slow_but(["makes_fp32", "vit"], "makes_fp32"))
def test_every_stage_trains_as_fsdp2_alone_does(ranks2, name, mode):
    for runs, (losses, parameters) in ranks2.run(_all_stages, name, mode):
        for ours, our_parameters in runs.values():
            assert ours == losses
            assert same_bits(our_parameters, parameters) == []


LOW, FP32 = torch.bfloat16, torch.float32


def _seen(**options):
    model = wrapped("makes_fp32", "bf16", **options)
    if options.get("keep") == ["blocks.1"]:
        assert model.head.weight.dtype == FP32
    model(batch("llama", 0)).backward()
    return [set(block.seen) for block in model.blocks]


def test_units_take_all_floating_point_inputs_in_the_modes_dtype_and_others_as_they_come(ranks2):
    assert ranks2.run(_seen)[0] == [{(LOW, LOW, torch.int64)}] * 2


def test_a_unit_in_an_fp32_region_gets_fp32_inputs_uncast(ranks2):
    plan = ranks2.run(_plan_of, keep=["blocks.1"])[0]
    assert [plan.input_dtype(fqn) for fqn in ("", "blocks.0", "blocks.1")] == [LOW, LOW, None]
    assert ranks2.run(_seen, keep=["blocks.1"])[0] == [{(LOW, LOW, torch.int64)}, {(FP32, FP32, torch.int64)}]


def _plan_of(**options):
    return zeroamp.explain(wrapped("makes_fp32", "bf16", **options)).plan


def _tables_of_a_region():
    """Whether the tables that reach a region are the fp32 ones, and not those after a cast to bf16 and back."""
    model, tables = wrapped("makes_fp32", "bf16", keep=["blocks.1"]), []
    forward = model.blocks[1].forward

    def spied(x, *, tables):
        seen.append(tables["cos"])
        return forward(x, tables=tables)

    seen, model.blocks[1].forward = tables, spied
    model(batch("llama", 0))
    return all(torch.equal(table, table.bfloat16().float()) for table in seen), len(seen)


def test_a_region_keeps_the_bits_of_its_inputs(ranks2):
    assert ranks2.run(_tables_of_a_region)[0] == (False, 1)


def _kept_names(keep):
    """A unit without a low-precision parameter of its own: only its parameters are kept in fp32."""
    plan = _plan_of(keep=keep)
    return plan.input_dtype("blocks.0"), {p.dtypes.param for p in plan.params if p.fqn.startswith("blocks.0")}


def test_a_unit_of_parameters_that_are_kept_in_fp32_takes_its_inputs_in_the_modes_dtype(ranks2):
    assert ranks2.run(_kept_names, ["blocks.0.*.weight", "blocks.0.*.bias"])[0] == (LOW, {FP32})


def _compiled(compiled):
    model = wrapped("makes_fp32", "bf16", 3)
    if compiled:
        for block in model.blocks:
            block.seen = _Nowhere()
            block.compile(backend="eager", fullgraph=True)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for loss in losses_of(model):
        losses.append(float(loss.detach()))
        step.backward(loss)
        step.step()
    return losses


class _Nowhere:
    def append(self, _item):
        pass


def test_compiling_units_changes_no_bit(ranks2):
    plain, compiled = (ranks2.run(_compiled, is_compiled) for is_compiled in (False, True))
    assert plain == compiled


def _of_registered_method():
    model = wrapped("makes_fp32", "bf16")
    model.embedded = lambda x: x.dtype
    zeroamp.register_forward_method(model, "embedded")
    return model.embedded(torch.ones(2))


def test_a_registered_method_takes_its_inputs_as_the_forward_does(ranks2):
    assert ranks2.run(_of_registered_method) == [LOW, LOW]


def _verify(name):
    model = wrapped(name, "bf16")
    if name == "vit":
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    else:
        inputs = batch("llama", 0)
    return zeroamp.explain(model).verify(model, inputs).to_dict() and True


@pytest.mark.parametrize("name", slow_but(["makes_fp32", "vit"], "makes_fp32"))
def test_the_ledger_is_verified(ranks2, name):
    ranks2.run(_verify, name)
