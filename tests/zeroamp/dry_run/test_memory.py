"""What the dry run says of memory and traffic is what real training on two and four ranks shows."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch

from tests.measuring.measured import measured_step
from tests.models.small import Llama
from tests.processes.training import SmallTraining, config
from tests.selection import slow_but
from tests.zeroamp.dry_run.plans import plan
from zeroamp.dry_run.memory import _Sizes
from zeroamp.dry_run.timeline import KINDS, PHASES
from zeroamp.dry_run.traced_micro_batch import EventRecorder
from zeroamp.hooks.collectives.gradient_reduction import GroupReduceScatter
from zeroamp.planning.mesh import ranks_of
from zeroamp.wrapping.state import wrap_state

STATISTICS = 256
"""Bytes of the numbers of the step's all-reduce that live past it, which are not predicted: the last report's loss and
norm, and which of the model's parameters were used."""
GROUP_NORMS = 128
"""Bytes: what four group norms keep of the mean and deviation of 16 samples in fp32, and in bf16 on fake tensors."""


def check(answers, is_even=True, more=0):
    for rank, (found, predicted) in enumerate(answers):
        assert predicted["traffic"] == found["traffic"]
        assert predicted["left over"] == {"gradients": predicted["gradients"]}
        for kind in ("parameters", "gradients", "on the host"):
            assert predicted[kind] == found[kind], kind
        if rank == 0 or is_even:
            assert predicted["optimizer state"] == found["optimizer state"]
            assert abs(found["peak"] - predicted["peak"]) <= STATISTICS + more
        else:  # shards of later ranks are padded, which their optimizer does not see
            assert predicted["optimizer state"] >= found["optimizer state"]


@pytest.mark.parametrize(("stage", "checkpointing"), [(0, False), (1, True), (2, False), (3, True)])
def test_every_stage_with_and_without_checkpointing(ranks2, stage, checkpointing):
    check(ranks2.run(measured_step, "llama_tied", {"stage": stage, "threshold": 0}, checkpointing))


@pytest.mark.slow
def test_a_model_with_sizes_that_the_ranks_do_not_divide(ranks2):
    check(ranks2.run(measured_step, "conv", {"stage": 3, "threshold": 0}, True), is_even=False, more=GROUP_NORMS)


def freeze_the_first(model):
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)


BLOCK = 10_272 + 64
BF16 = {"dtype": None, "bf16": {"enabled": True}}
EACH = {"stage": 3, "threshold": 0}
WAYS = {
    "a window": ("llama_untied", {"stage": 1, "accumulation": 4}, True),
    "units of their own": ("scaled", {"stage": 3, "threshold": 1000, "accumulation": 2}),
    "units that cast their inputs": ("makes_fp32", {**EACH, **BF16}),
    "states in bf16": ("llama_tied", {"stage": 3, "data_types": {"optimizer_states_dtype": "bf16"}}),
    "native sums": ("llama_tied", {"stage": 2, "zeroamp": {"reduce_accumulate_dtype": "native"}}),
    "sums in bf16": (
        "llama_tied", {"stage": 1, **BF16, "data_types": {"grad_accum_dtype": "bf16"}, "accumulation": 2},
    ),
    "live": ("llama_untied", {**EACH, "accumulation": 2}, False, {"max_live_parameters": BLOCK}),
    "prefetch": ("llama_untied", EACH, False, {"prefetch_bucket_size": BLOCK}),
    "frozen units are gathered ahead in vain": (
        "llama_untied", {**EACH, "accumulation": 2}, False, {}, None, freeze_the_first,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", slow_but(WAYS, "units of their own", "states in bf16"))
def test_every_way_to_train(ranks2, way):
    check(ranks2.run(measured_step, *WAYS[way]))


@pytest.mark.parametrize("checkpointing", slow_but([False, True], False))
def test_activations_on_the_host(ranks2, checkpointing):
    options = EACH | {"stage": 1 if checkpointing else 3}
    check(ranks2.run(measured_step, "llama_tied", options, checkpointing, offload=True))


def test_a_reloaded_activation_has_the_strides_that_it_had():
    recorder, tensor = EventRecorder([]), torch.ones(2, 3, 4).transpose(0, 2)
    assert recorder.reload(recorder.offload(tensor)).stride() == tensor.stride()


@pytest.mark.slow
def test_hybrid_sharding_and_a_secondary_partition(ranks4):
    check(ranks4.run(measured_step, "llama_untied", {"stage": 2}, False, {}, (2, 2)))
    check(ranks4.run(measured_step, "llama_untied", EACH, False, {"hpz_partition_size": 2}))


def _reduced_bytes(options):
    """Return (group, bytes of a reduction's output) as allocated in a step and as the dry run counts them."""
    training = SmallTraining(config(**options))
    state = wrap_state(training.model)
    call, found = GroupReduceScatter.__call__, {}

    def noted(comm, output_tensor, *args, **kwargs):
        found[comm.group_name] = output_tensor.nbytes
        return call(comm, output_tensor, *args, **kwargs)

    with patch.object(GroupReduceScatter, "__call__", noted):
        training.backward()
    ranks = ranks_of(state.mesh)
    return found, {group.name: _Sizes(group, state.plan, ranks).reduced for group in state.plan.groups}


NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}


@pytest.mark.parametrize("options", [{}, NATIVE, {"dtype": "float16"}, {"dtype": "float16", **NATIVE}], ids=str)
def test_the_output_of_a_reduction(ranks2, options):
    for found, predicted in ranks2.run(_reduced_bytes, {"stage": 2, **options}):
        assert found == predicted


def test_an_accelerator_holds_all_receive_buffers():
    """An accelerator holds the receive buffers of all groups during the whole step."""
    model = Llama(tied=False)
    stage = plan({"threshold": 1000}, model).stages[-1]
    sizes = [(group, _Sizes(group, stage.plan, stage.ranks)) for group in stage.plan.groups]
    largest = Counter()
    for group, size in sizes:
        if group.unit not in stage.plan.own_units:
            largest[size.communication] = max(largest[size.communication], size.received)
    assert stage.plan.own_units
    assert len(largest) == 2
    assert all(largest.values())
    held = stage.memory.num_bytes[stage.memory.phases != PHASES.index("init"), KINDS.index("communication buffers")]
    assert held.min() == held[-1] == largest.total()
