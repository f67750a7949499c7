"""Which embeddings and heads are units of their own."""

import pytest
from torch import nn

import zeroamp
from tests.models.small import build, hf_llama
from tests.processes.training import config
from tests.processes.training import policy as policy_of
from zeroamp.dry_run.fsdp_replay import step_schedule
from zeroamp.planning.plan import build_plan
from zeroamp.policies.auto_wrap import OwnUnits

LARGE = 1000  # elements: embeddings and heads have 2,560, norms 32


def plan(model, stage=3, threshold=LARGE, auto_wrap_policy=None, **options):
    model = build(model) if isinstance(model, str) else model
    policy = zeroamp.policy_from_config(config(stage, threshold=threshold, **options))
    return build_plan(model, policy, auto_wrap_policy)


def test_embedding_and_head_of_an_untied_model():
    """The embedding and the head of an untied model which transformers may name."""
    built = plan(hf_llama(tied=False))
    assert built.own_units == OwnUnits(lookups=("model.embed_tokens",), heads=("lm_head",))
    built = plan("llama_untied")
    assert built.own_units == OwnUnits(lookups=("embed",), heads=("head",))
    assert built.units == ("blocks.0", "blocks.1", "blocks.2", "embed", "head")
    groups = {group.name: {param.fqn for param in group.params} for group in built.groups}
    assert (groups["embed"], groups["head"]) == ({"embed.weight"}, {"head.weight"})
    assert "root" not in groups, "what is left, the last norm, is with the other norms"
    assert "norm.weight" in groups["model-wide:fp32"]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama_untied", {"stage": 2}),
        ("llama_untied", {"zeroamp": {"own_units": False}}),
        ("llama_untied", {"threshold": None}),
        ("llama_tied", {}),
        ("functional_tie", {"auto_wrap_policy": {"Body"}}),
    ],
    ids=["stage 2", "switched off", "small", "tied", "inside a unit"],
)
def test_none(model, options):
    assert not plan(model, **options).own_units


def test_live_units_are_counted_without_them():
    numel = plan("llama_untied").unit_numels()["blocks.2"]
    policy = policy_of(config(threshold=LARGE), {"max_live_parameters": numel})
    built = build_plan(build("llama_untied"), policy)
    calls = step_schedule(built)
    assert {name: calls.count(("all_gather", name)) for name in ("embed", "blocks.1", "blocks.2", "head")} == {
        **dict.fromkeys(("embed", "blocks.2", "head"), 1),
        "blocks.1": 2,
    }


def test_only_what_comes_after_the_units_is_a_head():
    model = nn.ModuleDict({"head": nn.Linear(80, 80), "blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
    assert not plan(model).own_units
    model["small"] = nn.Linear(4, 4)
    model["last"] = nn.Conv1d(80, 80, 1)
    assert not plan(model).own_units
    model["last"] = nn.Linear(80, 80)
    assert plan(model).own_units == OwnUnits(heads=("last",))


def test_an_embedding_whose_table_a_hook_may_read_is_no_lookup():
    for register in (nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook):
        model = build("llama_untied")
        register(model.embed, lambda *_: None)
        assert plan(model).own_units == OwnUnits(heads=("embed", "head"))
