"""Options and ways to prepare and use a model: losses, norms and parameters of one process, bit for bit.

`tests/zeroamp/training/test_parity.py` has the stages, modes and meshes by themselves.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.models.prepared import checkpoint_inside, checkpoint_outside, compile_blocks
from tests.models.small import batch, loss_of
from tests.oracles import one_process
from tests.processes.training import check_runs, config, train
from tests.selection import slow_but

NUM_STEPS = 2  # AdamW reads its state from the second one on
CLIP = 0.1  # low enough that every step clips
BLOCK = 10_272 + 64  # elements of a block of "llama": Linear layers and norms
OWN = 1000  # as the threshold: embeddings and heads, of 2,560 elements, are units of their own
BF16 = {"dtype": None, "bf16": {"enabled": True}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and what the oracle is told of it."""

    model: str = "two_blocks"
    stages: tuple[int, ...] = (3,)
    world_size: int = 2
    mesh: tuple[int, int] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the config."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Of the policy, beside the config's."""
    before: Callable | None = None
    """Called with the model before it is wrapped, and with the oracle's if that has no other."""
    after: Callable | None = None
    """Called with the wrapped model."""
    between: Callable | None = None
    """Called after every backward."""
    oracle: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def reverse(model):
    """Run the blocks in another order than they are registered in."""

    def logits(tokens):
        x = model.embed(tokens)
        for block in reversed(model.blocks):
            x = block(x)
        return model.head(model.norm(x))

    model.logits = logits


def evaluate(model, name):
    with torch.no_grad():
        loss_of(model, batch(name, 0))


def move(model, _name):
    """Give all parameters other memory, as `.to(device)` does, and then a block's, whose norms are in another group."""
    model._apply(torch.clone)
    model.blocks[1]._apply(torch.clone)


def set_by_methods_of_fsdp2(model):
    """More input buffers, and a group of reductions apart: FSDP2 has these methods from torch 2.13 on."""
    if hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_reduce_scatter_max_input_buffers(3)
        model.set_separate_reduce_scatter_group()


def freeze_head(model):
    model.head.requires_grad_(False)


def to_low_in_part(model):
    model.blocks[1].half()
    model.embed.bfloat16()


def to_low_in_part_and_back(model):
    to_low_in_part(model)
    model.float()


def own(model="two_blocks_untied", **more):
    return Case(model=model, options={"threshold": OWN, **more.pop("options", {})}, **more)


ACCUMULATED = {"accumulation": 3, "reduce_each": True}
TWICE = {"accumulation": 2, "reduce_each": True}
HEAD_BIAS_IN_FP32 = {"zeroamp": {"overrides": [{"modules": "head.bias", "communication": "fp32"}]}}
NOT_OWN = {"zeroamp": {"own_units": False}}
AHEAD = {"prefetch_bucket_size": BLOCK}
HPZ = {"hpz_partition_size": 2}
ON_CPU = {"offload": {"device": "cpu"}}

CASES = {
    "compiled": Case(after=compile_blocks),
    "checkpointed inside of units": Case(options={"accumulation": 2}, after=checkpoint_inside, oracle=TWICE),
    "checkpointed around units": Case(options={"accumulation": 2}, after=checkpoint_outside, oracle=TWICE),
    "offload": Case(stages=(2, 3), options={"accumulation": 3, "threshold": 0}, fields=ON_CPU, oracle=ACCUMULATED),
    "offload, stages 0 and 1": Case(stages=(0, 1), fields=ON_CPU),
    # An evaluation in another order leaves gathers that nothing waited for. The next step must not use them.
    "prefetch, reversed, evaluations": Case(model="llama_tied", fields=AHEAD, before=reverse, between=evaluate),
    "live units": Case(model="two_blocks_untied", fields={"max_live_parameters": BLOCK}, between=evaluate),
    "hpZ, a group per unit, evaluations": Case(
        world_size=4, options={"accumulation": 2, "threshold": 0}, fields=HPZ, between=evaluate, oracle=TWICE
    ),
    # Both ranks that shard are asked for, which is no partition at all: FSDP2 takes it so.
    "hpZ, HSDP": Case(world_size=4, mesh=(2, 2), fields=HPZ),
    "own units, scaled": own("scaled"),
    "own units, checkpointed lookup": own("checkpointed_lookup"),
    "own units, positions": own("positions"),
    "own units, times weight": own("times_weight"),
    "own units, inference reads": own("inference_reads"),
    "own units, bf16": own(options=BF16, oracle={"low_model": torch.bfloat16}),
    "own units, frozen head": own(before=freeze_head),
    "own units, two groups": own("chunked_calls", options=HEAD_BIAS_IN_FP32),
    "own units, live units": own(options={"accumulation": 2}, fields={"max_live_parameters": BLOCK}, oracle=TWICE),
    "a head that is read, no own units": own("chunked_reads", options=NOT_OWN),
    "methods of FSDP2": Case(options={"accumulation": 2, "threshold": 0}, after=set_by_methods_of_fsdp2, oracle=TWICE),
    "moved": Case(stages=(1, 3), between=move),
    "odd rows": Case(model="odd_rows", stages=(1, 3)),
    "odd rows, HSDP": Case(model="odd_rows", stages=(1, 3), world_size=4, mesh=(2, 2), oracle={"num_replicas": 2}),
    "stored in bf16 and in fp16": Case(
        stages=(0, 3), before=to_low_in_part, oracle={"prepare": to_low_in_part_and_back}
    ),
}
FAST = (
    "compiled",
    "checkpointed inside of units",
    "checkpointed around units",
    "offload",
    "prefetch, reversed, evaluations",
    "live units",
    "own units, scaled",
    "own units, checkpointed lookup",
    "own units, frozen head",
    "own units, two groups",
    "own units, live units",
    "methods of FSDP2",
    "moved",
    "hpZ, a group per unit, evaluations",
    "odd rows",
    "stored in bf16 and in fp16",
)


def _train(name):
    """Return the Run of each stage, of this rank."""
    case = CASES[name]
    options = {"mesh_shape": case.mesh, "fields": case.fields, "prepare_before": case.before, "prepare": case.after}
    cfgs = [config(stage, clip=CLIP, **case.options) for stage in case.stages]
    return [train(case.model, cfg, NUM_STEPS, between=case.between, **options) for cfg in cfgs]


@pytest.mark.parametrize("name", slow_but(CASES, *FAST))
def test_training_has_the_bits_of_one_process(request, name):
    case = CASES[name]
    oracle = {"prepare": case.before, **case.oracle}
    expected = one_process.train(case.model, world_size=case.world_size, num_steps=NUM_STEPS, clip=CLIP, **oracle)
    check_runs(request.getfixturevalue(f"ranks{case.world_size}").run(_train, name), expected)


def _compiled_with_inductor():
    def compile_with_inductor(model):
        for block in model.blocks:
            block.compile(fullgraph=True)

    return train("two_blocks", config(3), NUM_STEPS, prepare=compile_with_inductor).losses


@pytest.mark.slow
def test_inductor_compiles_each_block_whole_and_trains(ranks2):
    losses, _, _ = one_process.train("two_blocks", world_size=2, num_steps=NUM_STEPS)
    ours = ranks2.run(_compiled_with_inductor)[0]
    # inductor fuses and reorders bf16 arithmetic: 2^-8 per rounding, over a few steps.
    torch.testing.assert_close(torch.tensor(ours), torch.tensor([ranks[0] for ranks in losses]), rtol=2e-2, atol=0)
    assert ours[-1][0] < ours[0][0]
