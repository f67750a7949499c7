"""What went wrong elsewhere, mostly in DeepSpeed 0.19.8 and before: one test per report, named after the symptom."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.processes.training import config, full_parameters, same_bits, train, wrapped
from tests.selection import slow_but

NAME = "llama_tied"
HALF = {"dtype": "float16", "fp16": {"initial_scale_power": 16, "hysteresis": 1}}


def _first_step(cfg, lr=1.0, mesh_shape=None):
    """One SGD step: (loss, norm, the change of all parameters, the loss scale)."""
    model = wrapped("llama_untied", cfg, mesh_shape=mesh_shape)
    before = full_parameters(model)
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=lr))
    reports = []
    while not reports or reports[-1].skipped:  # the first scale may be too large: skip until it fits
        step.backward(loss_of(model, batch("llama_untied", dist.get_rank())))
        reports.append(step.step())
    after = full_parameters(model)
    change = torch.cat([(after[fqn] - before[fqn]).flatten() for fqn in before])
    return reports[-1].loss, reports[-1].grad_norm, change, reports[-1].loss_scale


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_norm_is_not_multiplied_by_65536(ranks2, stage):
    half = ranks2.run(_first_step, config(stage, **HALF))[0]
    full = ranks2.run(_first_step, config(stage, dtype=None))[0]
    assert half[3] > 1000  # it was scaled
    assert half[1] == pytest.approx(full[1], rel=1e-2)  # float16 keeps 11 bits


@pytest.mark.parametrize("stage", [0, 3])
def test_a_clip_of_one_does_not_over_clip_a_smaller_gradient(ranks2, stage):
    clipped, free = (ranks2.run(_first_step, config(stage, clip=clip, **HALF))[0] for clip in (1.0, 0.0))
    assert free[1] < 1.0
    assert torch.equal(clipped[2], free[2])


def test_the_clipped_update_has_the_length_of_the_clip(ranks2):
    _, norm, change, _ = ranks2.run(_first_step, config(3, clip=0.01, **HALF))[0]
    assert norm > 0.01
    assert float(change.norm()) == pytest.approx(0.01, rel=1e-3)  # eps of the clipping rule, fp32 parameters


def test_an_overflow_lowers_the_scale_until_it_trains(ranks2):
    # From 2^24 the raw fp16 gradients overflow for several steps; a scale that is never lowered would never train.
    cfg = config(2, dtype="float16", fp16={"initial_scale_power": 24, "hysteresis": 1})
    assert ranks2.run(_first_step, cfg)[0][3] < 2**24


def _two_models():
    """A float16 autocast model first, then another one that must know nothing of it."""
    _first_step(config(2, **HALF))
    model = wrapped("llama_untied", config(2, dtype=None, bf16={"enabled": True}, comm="fp32"))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    zeroamp.traffic(model).reset()
    step.backward(loss_of(model, batch("llama_untied", dist.get_rank())))
    report = step.step()
    dtypes = {key.dtype for key in zeroamp.traffic(model).calls if key.collective == "all_to_all"}
    return report.loss_scale, report.grad_norm, dtypes, torch.is_autocast_enabled("cpu")


def test_no_state_leaks_from_one_model_to_the_next(ranks2):
    scale, norm, dtypes, autocast = ranks2.run(_two_models)[0]
    assert (scale, dtypes, autocast) == (1.0, {torch.float32}, False)
    assert norm < 10


@pytest.mark.parametrize("world_size", slow_but([2, 4], 2))
@pytest.mark.parametrize("accumulate", ["fp32", "native"])
def test_gradients_are_averaged_not_divided_twice_on_an_fp16_wire(request, world_size, accumulate):
    ranks = request.getfixturevalue(f"ranks{world_size}")
    options = {**HALF, "zeroamp": {"reduce_accumulate_dtype": accumulate}}
    half = ranks.run(_first_step, config(3, **options))[0]
    full = ranks.run(_first_step, config(3, dtype=None))[0]
    ratio = float(half[2] @ full[2] / full[2].square().sum())
    assert ratio == pytest.approx(1.0, abs=2e-3)  # a missed or doubled factor would be 2 or more


@pytest.mark.slow
def test_gradients_are_averaged_once_over_shards_and_replicas_on_an_fp16_wire(ranks4):
    options = {**HALF, "zeroamp": {"reduce_accumulate_dtype": "native"}}
    half = ranks4.run(_first_step, config(3, **options), 1.0, (2, 2))[0]
    full = ranks4.run(_first_step, config(3, dtype=None), 1.0, (2, 2))[0]
    assert float(half[2] @ full[2] / full[2].square().sum()) == pytest.approx(1.0, abs=2e-3)


def _fp16_accumulation(stage):
    options = {"fp16": {"loss_scale": 128}, "data_types": {"grad_accum_dtype": "fp16"}}
    cfg = config(stage, dtype="float16", accumulation=2, zeroamp={"reduce_accumulate_dtype": "native"}, **options)
    model = wrapped("llama_untied", cfg, mesh_shape=(2, 2))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        step.backward(loss_of(model, batch("llama_untied", dist.get_rank())))
        report = step.step()
    return report.grad_norm


@pytest.mark.parametrize("stage", slow_but([1, 2, 3], 3))
def test_fp16_accumulation_on_a_native_fp16_wire_with_replicas(ranks4, stage):
    full = ranks4.run(_first_step, config(3, dtype=None), 1.0, (2, 2))[0]
    assert ranks4.run(_fp16_accumulation, stage)[0] == pytest.approx(full[1], rel=1e-2)  # 11 bits, summed


def _embedding_output(stage):
    model = wrapped(NAME, config(stage))
    seen = {}
    model.embed.register_forward_hook(lambda m, a, out: seen.update(out=out.detach().clone()))
    model(batch(NAME, 0))
    return torch.equal(seen["out"], build(NAME).embed(batch(NAME, 0)))


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_a_tied_embedding_is_not_rounded(ranks2, stage):
    assert ranks2.run(_embedding_output, stage)[0] is True


def _norms_seen(steps):
    """Whether the norms of the blocks hold unrounded fp32 values in every forward, the later ones too."""
    model = wrapped(NAME, config(3))
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    seen = []
    block = model.blocks[1].norm1
    block.register_forward_pre_hook(lambda m, a: seen.append(m.weight.detach().clone()))
    for index in range(steps):
        step.backward(loss_of(model, batch(NAME, index)))
        step.step()
    return [(weight.dtype, bool((weight != weight.bfloat16().float()).any())) for weight in seen]


def test_small_parameters_are_fp32_in_every_step(ranks2):
    # The first forward sees ones, which rounding would not change; later ones see what AdamW made of them.
    assert ranks2.run(_norms_seen, 3)[0] == [(torch.float32, False), (torch.float32, True), (torch.float32, True)]


class LinearWithEmpty(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return super().forward(x) + self.nothing.sum()


class WithEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(LinearWithEmpty() for _ in range(2))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + self.empty.sum()


def _empty(stage):
    torch.manual_seed(0)
    model = zeroamp.wrap_model(WithEmpty(), zeroamp.policy_from_config(config(stage, clip=1.0)))
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 8))
        step.backward(loss)
        losses.append(step.step().loss)
    return losses


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_parameters_without_elements(ranks2, stage):
    losses = ranks2.run(_empty, stage)[0]
    assert losses[-1] < losses[0]


class Adapted(nn.Module):
    """A frozen bf16 base with trainable fp32 adapters."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.base = nn.Linear(16, 16).bfloat16().requires_grad_(False)
            block.down, block.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
            block.forward = lambda x, block=block: x + block.base(x) + block.up(block.down(x))
            self.blocks.append(block)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def _adapters(stage):
    torch.manual_seed(0)
    model = zeroamp.wrap_model(Adapted(), zeroamp.policy_from_config(config(stage)))
    trained = [p for p in model.parameters() if p.requires_grad]
    step = zeroamp.TrainStep(model, torch.optim.AdamW(trained, lr=1e-2))
    frozen = {fqn: p for fqn, p in full_parameters(model).items() if "base" in fqn}
    losses = []
    for _ in range(3):
        step.backward(model(torch.ones(2, 16)))
        losses.append(step.step().loss)
    after = full_parameters(model)
    return losses, same_bits({fqn: after[fqn] for fqn in frozen}, frozen), {p.dtype for p in frozen.values()}


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_fp32_adapters_train_on_a_frozen_bf16_base(ranks2, stage):
    losses, changed, dtypes = ranks2.run(_adapters, stage)[0]
    assert losses[-1] < losses[0]
    assert changed == []
    assert dtypes == {torch.bfloat16}


def _buffers(options):
    model = build("llama_tied")
    model.register_buffer("inv_freq", torch.rand(8, dtype=torch.float32))
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3, **options)))
    model(batch(NAME, 0))
    return model.inv_freq.dtype


def test_buffers_are_not_cast_by_a_precision_mode(ranks2):
    for options in ({}, {"dtype": None, "bf16": {"enabled": True}}):
        assert ranks2.run(_buffers, options)[0] == torch.float32


def test_the_last_micro_batch_counts_and_so_do_the_others(ranks2):
    # Dropped, doubled or unreduced micro-batches would each show in the bits.
    runs = ranks2.run(_accumulate)
    _, norms, parameters = one_process.train(NAME, world_size=2, num_steps=2, accumulation=3, reduce_each=True)
    for run in runs:
        assert run.norms == norms
        assert same_bits(run.parameters, parameters) == []


def _accumulate():
    return train(NAME, config(2, accumulation=3), 2)


def test_stage_0_reports_a_norm(ranks2):
    assert ranks2.run(_first_step, config(0))[0][1] > 0
