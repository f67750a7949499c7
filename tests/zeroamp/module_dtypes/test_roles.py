"""The output head and the routers in fp32, by their role: bit for bit plain autocast with these modules in fp32."""

import dataclasses
import json

import pytest
import torch

import zeroamp
from tests.models.experts import EXPERTS
from tests.models.small import Llama, hf_llama
from tests.oracles import families as oracle
from tests.processes.experts import LR, NUM_STEPS, config, train
from tests.processes.training import same_bits
from zeroamp.ledger.explain import Ledger

pytest.importorskip("transformers", reason="the models are transformers'")

FP32 = {"modules": ["@lm_head", "@router"], "compute": "fp32", "communication": "fp32"}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


def _in_fp32(family, suffixes):
    """Return the family with modules that run with autocast off on fp32 inputs. Plain torch."""

    def seeded():
        model = family.build()
        for fqn, module in model.named_modules():
            if fqn.endswith(suffixes):
                module.forward = _without_autocast(module.forward)
        return model

    return dataclasses.replace(family, build=seeded)


def _without_autocast(forward):
    def run(hidden):
        with torch.autocast("cpu", enabled=False):
            return forward(hidden.float())

    return run


def test_training_has_the_bits_of_these_modules_in_fp32(ranks2):
    expected = oracle.train(_in_fp32(EXPERTS["Mixtral"], ("mlp.gate", "lm_head")), num_steps=NUM_STEPS, lr=LR)
    plain = oracle.train(EXPERTS["Mixtral"], num_steps=NUM_STEPS, lr=LR)
    assert expected.losses != plain.losses
    cfg = config(3, is_low=False)
    cfg["zeroamp"]["overrides"] = [FP32]
    for rank, run in enumerate(ranks2.run(train, "Mixtral", cfg)):
        assert run.losses == expected.losses[rank]
        assert same_bits(run.parameters, expected.parameters) == []
        assert not [fqn for fqn in run.low if fqn.endswith(("mlp.gate.weight", "lm_head.weight"))]


def _plan(model, zeroamp_block=None, **keys):
    return zeroamp.build_plan(model, zeroamp.policy_from_config({**keys, "zeroamp": zeroamp_block or {}}))


def test_the_same_by_keep_in_fp32_modules_and_a_tied_head():
    kept = {"data_types": {"keep_in_fp32_modules": ["@lm_head"]}}
    for tied in (False, True):
        by_override = _plan(hf_llama(tied), {"overrides": [{"modules": "@lm_head", "compute": "fp32"}]}, **AUTOCAST)
        by_list = _plan(hf_llama(tied), **AUTOCAST, **kept)
        assert set(by_override.fp32_regions.modules) == set(by_list.fp32_regions.modules) == {"lm_head"}
        dtypes = {name: param.dtypes for param in by_list.params for name in (param.fqn, *param.aliases)}
        head = dtypes["lm_head.weight"]
        assert (head.param, head.communication) == (torch.float32, torch.float32)
        assert head.compute == ("per op" if tied else "fp32")
    with pytest.raises(zeroamp.ConfigError, match="name all owners of a tied parameter"):
        _plan(hf_llama(tied=True), bf16={"enabled": True}, **kept)


def test_routers_have_other_names_too():
    plan = _plan(EXPERTS["gpt-oss"].build(), {"overrides": [FP32]}, **AUTOCAST)
    assert "model.layers.0.mlp.router" in plan.fp32_regions.modules


def test_a_role_that_the_model_does_not_have_names_what_it_has():
    for pattern, model, error in (
        ("@router", hf_llama(tied=False), "'@router' names no module of LlamaForCausalLM: .*it has lm_head"),
        ("@lm_head", Llama(tied=False), "no get_output_embeddings, and no module named lm_head. .*it has head, blocks"),
        ("@norm", Llama(tied=False), 'Write "@lm_head" or "@router"'),
    ):
        with pytest.raises(zeroamp.ConfigError, match=error):
            _plan(model, {"overrides": [{"modules": pattern, "compute": "fp32"}]}, **AUTOCAST)


@pytest.mark.parametrize(("override", "head"), [({}, "bfloat16"), (FP32, "float32")], ids=str)
def test_the_dtypes_for_an_inference_engine(override, head):
    model = EXPERTS["Mixtral"].build()
    plan = _plan(model, {"overrides": [override] if override else []}, **AUTOCAST)
    found = json.loads(json.dumps(zeroamp.inference_dtypes(Ledger(plan=plan))))
    assert (found["dtype"], found["head_dtype"]) == ("bfloat16", head)
    assert found["modules"]["model.layers.0.self_attn.q_proj"] == "bfloat16"
    assert found["modules"].get("model.layers.0.mlp.gate") == ("float32" if override else None)
    assert "model.norm" not in found["modules"]
    assert found["modules"].keys() <= dict(model.named_modules()).keys()
