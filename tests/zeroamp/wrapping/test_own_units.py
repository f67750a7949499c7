"""Embeddings and heads as units of their own: same bits, fewer bytes held, and every way to use them."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.embeddings import cross_entropy
from tests.models.prepared import checkpoint_outside, compile_blocks
from tests.models.small import batch, build
from tests.oracles import one_process
from tests.processes.training import check_run, check_same_run, config, full_parameters, same_bits, train, wrapped
from tests.selection import slow_but
from zeroamp.dry_run.planned_traffic import plan_traffic
from zeroamp.hooks.collectives.collective_calls import peer_lost
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.wrapping.state import wrap_state

LARGE = 1000  # elements: embeddings and heads have 2,560
NUM_STEPS = 4


def _train(name, *, how=None, fields=None, mesh_shape=None, before=None, **options):
    cfg = config(3, threshold=LARGE, **options)
    return train(name, cfg, NUM_STEPS, prepare=how, fields=fields, mesh_shape=mesh_shape, prepare_before=before)


def _check(by_rank, name, **oracle):
    expected = one_process.train(name, world_size=len(by_rank), num_steps=NUM_STEPS, **oracle)
    for rank, run in enumerate(by_rank):
        check_run(run, rank, expected)


USES = (
    *("llama_untied", "chunked_calls", "checkpointed_chunks", "checkpointed_lookup", "checkpointed_scaled_lookup"),
    *("two_lookups", "positions", "scaled", "times_weight", "padded", "inference_reads"),
)


@pytest.mark.parametrize("name", slow_but(USES, "llama_untied", "scaled", "chunked_calls", "checkpointed_lookup"))
def test_the_same_bits_as_one_process(ranks2, name):
    _check(ranks2.run(_train, name), name)


def _compile_ends(model):
    # Not as one graph: on torch 2.15, FSDP2's own hooks break the graph of a compiled nn.Embedding or nn.Linear.
    model.embed.compile(backend="aot_eager")
    model.head.compile(backend="aot_eager")


def _compile_whole(model):
    model.compile(backend="aot_eager")


def _freeze_embedding(model):
    model.embed.requires_grad_(False)


def _freeze_head(model):
    model.head.requires_grad_(False)


TWO_GROUPS = [
    {"modules": "head.bias", "communication": "fp32"},
    {"modules": "embed.weight", "param": "bf16"},
    {"modules": "embed.bias", "param": "bf16", "communication": "fp32"},
]
"""The weight and the bias of an own unit are all-gathered in two collectives: their dtypes of the reduction differ."""

UNTIED, CHUNKED = "llama_untied", "chunked_calls"
WAYS = {
    "accumulation": (CHUNKED, {"accumulation": 3}, {"accumulation": 3, "reduce_each": True}),
    "fp32": (UNTIED, {"dtype": None}, {"autocast": None}),
    "bf16": (UNTIED, {"dtype": None, "bf16": {"enabled": True}}, {"low_model": torch.bfloat16}),
    "compiled blocks": (UNTIED, {"how": compile_blocks}, {}),
    "checkpointed blocks": (UNTIED, {"how": checkpoint_outside}, {}),
    "compiled ends": (UNTIED, {"how": _compile_ends}, {}),
    "compiled whole": (CHUNKED, {"how": _compile_whole}, {}),
    "frozen embedding": (UNTIED, {"before": _freeze_embedding}, {"prepare": _freeze_embedding}),
    "frozen head": (UNTIED, {"before": _freeze_head}, {"prepare": _freeze_head}),
    "two groups": (CHUNKED, {"zeroamp": {"overrides": TWO_GROUPS[:1]}}, {}),
    "read outside, switched off": ("chunked_reads", {"zeroamp": {"own_units": False}}, {}),
    "read by TRL's way, switched off": ("gathered_weight", {"zeroamp": {"own_units": False}}, {}),
}


@pytest.mark.parametrize(
    "way",
    slow_but(WAYS, "checkpointed blocks", "compiled ends", "frozen head", "two groups", "read outside, switched off"),
)
def test_the_same_bits_as_one_process_in_every_way_of_training(ranks2, way):
    name, options, oracle = WAYS[way]
    _check(ranks2.run(_train, name, **options), name, **oracle)


OPTIONS = {
    "live units": {"fields": {"max_live_parameters": 20_000}},
    "prefetch": {"fields": {"prefetch_bucket_size": 20_000}},
    "offload": {"fields": {"offload": {"device": "cpu"}}},
    "HSDP": {"mesh_shape": (2, 2)},
    "hpZ": {"fields": {"hpz_partition_size": 2}},
}


def _both(options):
    runs = [_train(UNTIED, accumulation=2, zeroamp={"own_units": own}, **options) for own in (True, False)]
    check_same_run(*runs)


@pytest.mark.parametrize("name", slow_but(OPTIONS, "live units"))
def test_options_and_meshes_change_no_bit(request, name):
    request.getfixturevalue("ranks4" if name in ("HSDP", "hpZ") else "ranks2").run(_both, OPTIONS[name])


def _step(model, name, accumulation=1):
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for index in range(accumulation):
        step.backward(model(batch(name, index)))
        step.step()


def _calls(name, accumulation, **options):
    """Return {group: [all-gathers, reductions]} of the groups of own units, of the plan and as counted in one step."""
    model = wrapped(name, config(3, threshold=LARGE, accumulation=accumulation, **options))
    plan, ranks = wrap_state(model).plan, zeroamp.planning.mesh.ranks_of(wrap_state(model).mesh)
    zeroamp.traffic(model).reset()
    _step(model, name, accumulation)
    found = []
    for traffic in (plan_traffic(plan, ranks), zeroamp.traffic(model)):
        calls = {group.name: [0, 0] for group in plan.groups if group.unit in plan.own_units}
        for key, number in traffic.calls.items():
            if key.group in calls:
                calls[key.group][key.collective != "all_gather"] += number
        found.append(calls)
    return found


@pytest.mark.parametrize(
    ("name", "overrides", "num_groups"),
    [
        ("llama_untied", [], 2),
        ("checkpointed_chunks", [], 2),
        ("scaled", [], 2),
        ("biased", TWO_GROUPS, 4),
        ("chunked_calls", TWO_GROUPS[:1], 3),
    ],
    ids=["used once", "computed again in chunks", "kept for the backward", "four groups", "three groups"],
)
def test_each_group_is_gathered_and_reduced_once_per_micro_batch(ranks2, name, overrides, num_groups):
    planned, counted = ranks2.run(_calls, name, 2, zeroamp={"overrides": overrides})[0]
    assert planned == counted
    assert list(counted.values()) == [[2, 2]] * num_groups


@pytest.mark.parametrize(("name", "num_gathers"), [("checkpointed_lookup", 1), ("checkpointed_scaled_lookup", 2)])
def test_a_lookup_that_is_computed_again_costs_one_more_gather(ranks2, name, num_gathers):
    assert ranks2.run(_calls, name, 1)[0][1] == {"embed": [num_gathers, 1], "head": [1, 1]}


def _states():
    """Return which own units are sharded: at each block's forward and backward, and after the backward."""
    model = wrapped("llama_untied", config(3, threshold=LARGE))
    found = []

    def note(*_args):
        found.append(
            {fqn: isinstance(model.get_submodule(fqn)._parameters["weight"], DTensor) for fqn in ("embed", "head")}
        )

    for index, module in enumerate((model.blocks[0], model.norm)):
        module.register_forward_pre_hook(note)
        if index == 0:
            module.register_full_backward_hook(note)
    loss = model(batch("llama_untied", 0))
    note()
    loss.backward()
    note()
    return found


def test_an_embedding_is_sharded_after_its_lookup_and_a_head_until_its_forward_and_after_its_backward(ranks2):
    both, only_embed = {"embed": True, "head": True}, {"embed": True, "head": False}
    assert ranks2.run(_states)[0] == [both, both, only_embed, both, both]


def _calls_outside():
    """Return {FQN: the errors of calls outside of the forward, before FSDP2 knows its root and after}."""
    model = wrapped("llama_untied", config(3, threshold=LARGE))
    inputs = {"embed": batch("llama_untied", 0), "head": torch.ones(2, 32)}
    texts = {fqn: [] for fqn in inputs}
    for _ in range(2):
        for fqn, value in inputs.items():
            with pytest.raises(zeroamp.WrapError) as error:
                model.get_submodule(fqn)(value)
            texts[fqn].append(str(error.value))
        with torch.no_grad():
            model(batch("llama_untied", 0))
    return texts


def test_a_call_outside_of_the_forward_is_an_error_by_name(ranks2):
    for fqn, texts in ranks2.run(_calls_outside)[0].items():
        for text in texts:
            assert f"{fqn} was called outside of the model's forward, where {fqn}.weight is sharded" in text
            assert "register_forward_method" in text


def _regularise():
    """Add a term to the loss outside of the forward; return the error's text."""
    model = wrapped("llama_untied", config(3, threshold=LARGE))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(batch("llama_untied", 0)) + 0.01 * model.embed.weight.pow(2).sum()
    with pytest.raises(zeroamp.StepError) as error:
        step.backward(loss)
    return str(error.value)


def test_a_loss_of_a_weight_that_was_read_after_the_forward_is_an_error_by_name(ranks2):
    text = ranks2.run(_regularise)[0]
    assert "is a DTensor: it was computed from a sharded parameter" in text
    assert '{"own_units": false}' in text


def _error_of_a_lost_peer(group):
    model = wrapped("llama_untied", config(3, threshold=LARGE))
    zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    issued = IssuedCollective("reduce_scatter", torch.empty(4), group, None)
    return str(peer_lost(RuntimeError("gloo/ timed out"), issued, wrap_state(model).listeners))


def test_the_error_of_a_lost_peer_names_the_cause_that_only_own_units_have(ranks2):
    cause = "The output of head must be in the loss of every rank that calls it"
    assert cause in ranks2.run(_error_of_a_lost_peer, "head")[0]
    assert "must be in the loss" not in ranks2.run(_error_of_a_lost_peer, "blocks.0")[0]


def _train_without_the_head_on_one_rank(own):
    """Let rank 1 compute its loss of the hidden states; the logits count as zeros."""
    model = wrapped("chunked_calls", config(3, threshold=LARGE, zeroamp={"own_units": own}))

    def loss(x, tokens):
        logits = model.head(x)
        return cross_entropy(logits, tokens) if dist.get_rank() == 0 else x.square().mean() + 0 * logits.sum()

    model.loss = loss
    _step(model, "chunked_calls")
    return full_parameters(model)


def test_a_head_may_be_in_the_loss_of_one_rank_as_zeros(ranks2):
    own, with_root = (ranks2.run(_train_without_the_head_on_one_rank, own)[0] for own in (True, False))
    assert same_bits(own, with_root) == []


def _register():
    model = wrapped("llama_untied", config(3, threshold=LARGE))
    zeroamp.register_forward_method(model, "logits")
    with torch.no_grad():
        logits = model.logits(batch("llama_untied", 0))
    weight = model.head.weight
    return logits, isinstance(weight, DTensor)


def test_a_registered_method_may_call_both(ranks2):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = build("llama_untied").logits(batch("llama_untied", 0))
    logits, is_sharded = ranks2.run(_register)[0]
    assert torch.equal(logits, expected)
    assert is_sharded, "reading a parameter outside of a forward unshards nothing"


def _read(name):
    """Return the error of a forward and backward that read a weight outside of its module, and its notes."""
    model = wrapped(name, config(3, threshold=LARGE))
    with pytest.raises((RuntimeError, zeroamp.WrapError)) as error:
        model(batch(name, 0)).backward()
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("chunked_reads", "head"),
        ("reads_in_forward", "head"),
        ("functional_tie", "embed"),
        ("gathered_weight", "head"),
    ],
)
def test_a_weight_that_is_read_outside_of_its_module_is_an_error_by_name(ranks2, name, module):
    text = ranks2.run(_read, name)[0]
    assert re.search(rf"{module}\.weight was read outside of its module", text)
    assert '{"own_units": false}' in text


def _steps(own, folder, *, load):
    """Return the parameters after two more steps; without `load`, a checkpoint is saved at the end."""
    model = wrapped("llama_untied", config(3, threshold=LARGE, zeroamp={"own_units": own}))
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if load:
        zeroamp.load_checkpoint(folder, model, step)
    for index in range(2):
        step.backward(model(batch("llama_untied", index)))
        step.step()
    if not load:
        zeroamp.save_checkpoint(folder, model, step)
    return full_parameters(model)


def _resume(folder):
    """Go on from a checkpoint in either grouping; return what differs from going on as before."""
    differing = []
    for saved in (False, True):
        _steps(saved, folder / str(saved), load=False)
        same, other = (_steps(own, folder / str(saved), load=True) for own in (saved, not saved))
        differing += same_bits(same, other)
    return differing


def test_checkpoints_of_either_grouping_load_in_the_other(ranks2, tmp_path):
    assert ranks2.run(_resume, tmp_path) == [[], []]
