"""Lists, dicts and objects that a unit receives are its caller's own, as in one process."""

import pytest
import torch

import zeroamp
from tests.models import side_channels
from tests.models.side_channels import build, noise
from tests.oracles import two_ranks
from tests.processes.training import on_fsdp2_alone, plain_loop, same_bits
from tests.selection import slow_but

NUM_STEPS = 2
STAGES = (0, 3)
MODES = {
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": {"bf16": {"enabled": True}},
    "fp32": {},
}


def loss_of(model, index):
    """Batch number `index` through the model, in the dtype of a model in bf16."""
    return model(noise(index).to(next(model.parameters()).dtype))


def _train(name, mode, stage, prepare=None, loss_of=loss_of):
    """Return (losses of this rank, full parameters, what the model saw of its objects)."""
    model = build(getattr(side_channels, name))
    model = zeroamp.wrap_model(model, {**MODES[mode], "zero_optimization": {"stage": stage}})
    if prepare is not None:
        prepare(model)
    return *plain_loop(model, loss_of, NUM_STEPS), model.same


def _all_stages(*args, **more):
    return {stage: _train(*args, stage, **more) for stage in STAGES}


def _check(by_rank, oracle, tolerance=0.0):
    """Losses and parameters, bit for bit, or with a tolerance relative to the largest."""
    losses, parameters = oracle
    for rank, by_stage in enumerate(by_rank):
        for stage, (own_losses, own_parameters, same) in by_stage.items():
            assert all(same), stage
            assert own_losses == pytest.approx(losses[rank], rel=0, abs=tolerance * losses[rank][0]), stage
            for fqn in same_bits(own_parameters, parameters):
                difference = (own_parameters[fqn] - parameters[fqn]).abs().max()
                assert difference <= tolerance * parameters[fqn].abs().max(), (stage, fqn)


# Where a state is read by several blocks, FSDP2 adds the gradients of each block before those of others: another order
# than in one process.
TOLERANCES = {"fp32": 1e-5, "autocast": 2e-2, "bf16": 2e-2}
CASES = {
    **{(name, mode): 0.0 for name in ("Routers", "LateRouters", "States") for mode in MODES},
    **{(name, mode): TOLERANCES[mode] for name in ("Sharing", "SharingOrdered", "SharingOther") for mode in MODES},
    ("SharingDefault", "bf16"): TOLERANCES["bf16"],
}
FAST = (("Routers", "autocast"), ("Sharing", "fp32"), ("Sharing", "bf16"), ("States", "bf16"), ("LateRouters", "fp32"))


@pytest.mark.parametrize("case", slow_but(CASES, *FAST), ids="-".join)
def test_blocks_share_containers_as_in_one_process(ranks2, case):
    name, mode = case
    oracle = two_ranks.train(build(getattr(side_channels, name)), loss_of, NUM_STEPS, mode=mode)
    _check(ranks2.run(_all_stages, name, mode), oracle, CASES[case])


def _checkpointed(use_reentrant):
    def prepare(model):
        model.checkpointing = use_reentrant

    return prepare


def _compiled(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")


def _by_method(model):
    """A loss of the root's own list, through a registered method."""
    zeroamp.register_forward_method(model, "run_all")


def _caller_of_root(model, index):
    losses = []
    inputs = noise(index).to(next(model.parameters()).dtype)
    (getattr(model, "run_all", None) or model)(inputs, losses)
    model.same.append(len(losses) == len(model.blocks))
    return sum(losses)


VARIANTS = {
    "checkpointed": ("Routers", "autocast", _checkpointed(False), loss_of),
    "checkpointed, casts": ("Routers", "bf16", _checkpointed(False), loss_of),
    "reentrant": ("Routers", "fp32", _checkpointed(True), loss_of),
    "compiled": ("Routers", "fp32", _compiled, loss_of),
    "compiled, casts": ("Sharing", "bf16", _compiled, loss_of),
    "the root's list": ("Routers", "bf16", None, _caller_of_root),
    "a method's list": ("RoutersWithMethod", "bf16", _by_method, _caller_of_root),
}


def _variant(variant):
    name, mode, prepare, loss_of = VARIANTS[variant]
    stages = (3,) if prepare is _compiled else (2, 3)
    with torch._dynamo.config.patch(recompile_limit=64):
        return {stage: _train(name, mode, stage, prepare=prepare, loss_of=loss_of) for stage in stages}


@pytest.mark.parametrize("variant", slow_but(VARIANTS, "checkpointed", "compiled, casts", "a method's list"))
def test_containers_are_shared_under_other_features(ranks2, variant):
    name, mode, prepare, loss_of = VARIANTS[variant]
    model = build(getattr(side_channels, name))
    if variant.startswith(("checkpointed", "reentrant")):
        prepare(model)
    oracle = two_ranks.train(model, loss_of, NUM_STEPS, mode=mode)
    # Compiled code in low precision rounds fewer intermediate results.
    _check(ranks2.run(_variant, variant), oracle, CASES[name.removesuffix("WithMethod"), mode])


def _after_errors():
    """What is in the caller's dict after forwards that raise, at several places."""
    seen = []
    for mode in ("fp32", "bf16"):
        model = build(side_channels.Failing)
        model = zeroamp.wrap_model(model, {**MODES[mode], "zero_optimization": {"stage": 3}})
        for where in (0, 1, "root"):
            state = {"fails": where, "x": noise(0).requires_grad_(), "others": [noise(1)]}
            before, others = state["x"], state["others"][0]
            try:
                model(noise(2), state)
            except KeyError:
                same = (state["x"] is before, state["others"][0] is others, state["x"].is_leaf, "count" in state)
                seen.append((mode, where, same))
            model(noise(2), {"fails": None, "x": noise(0), "others": []}).backward()
    return seen


def test_a_callers_elements_are_back_after_an_error(ranks2):
    for seen in ranks2.run(_after_errors):
        assert seen == [(m, w, (True, True, True, True)) for m in ("fp32", "bf16") for w in (0, 1, "root")]


def _of_fsdp2(name):
    """Return the losses of FSDP2 alone."""
    return plain_loop(on_fsdp2_alone(build(getattr(side_channels, name))), loss_of, NUM_STEPS)[0]


def test_fsdp2_alone_loses_what_a_block_writes(ranks2):
    """As a report to PyTorch: `FSDPParamGroup._register_post_backward_hook` rebuilds all lists and dicts around the
    tensors that need a gradient. Replacing only tensors outside of containers would be enough, because autograd runs
    that function after all others of the module. The smallest case, with `Block.forward(self, x, losses)` that appends:

        first, second, losses = fully_shard(Block(2, 2)), fully_shard(Block(2, 2)), []
        second(first(torch.ones(1, 2, requires_grad=True), losses), losses)
        assert len(losses) == 2  # fails: 1
    """
    for name in ("Routers", "Sharing"):
        losses, _ = two_ranks.train(build(getattr(side_channels, name)), loss_of, NUM_STEPS, mode="fp32")
        for rank, own in enumerate(ranks2.run(_of_fsdp2, name)):
            assert own != pytest.approx(losses[rank], rel=0.01), name
