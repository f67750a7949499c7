"""GRPO and RLOO on zeroamp: the completions, losses and weights of DDP under bf16 autocast."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.adapters import quietly
from tests.processes.trainer import outcome
from tests.processes.trl_training import STOCK, Case, build, llama, silence
from tests.selection import slow_but

pytest.importorskip("trl", reason="trl is not installed: its trainers are tested")
from zeroamp.integrations.transformers import ZeroampMixin as ZeroampTrainerMixin
from zeroamp.integrations.transformers.arguments import override_of_head
from zeroamp.integrations.trl import ZeroampMixin


@quietly
def _trained(case, stage, folder):
    """Train 3 steps; return the outcome and the completions. Ranks have completions of different lengths."""
    from transformers import AutoModelForCausalLM

    silence()
    generated = []

    def reward(completions, **_):
        generated.extend(completions)
        return [len(set(text)) / 10 for text in completions]

    path = Path(folder) / "model"  # the trainer loads a reference model from it
    if dist.get_rank() == 0:
        llama(case).save_pretrained(path)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 3, "max_completion_length": 8}
    trainer = build(case, stage, folder, model=model, reward=reward, **sizes)
    trainer.train()
    return outcome(trainer), generated


def _differences(case, stage, folder):
    expected, completions = _trained(case, STOCK, Path(folder) / "stock")
    ours, generated = _trained(case, stage, Path(folder) / "ours")
    found = ours.differences(expected, norms=False) + ["completions"] * (generated != completions)
    return found, len({len(text) for text in completions})


def _model(tied=False):
    return llama(Case(model={"tie_word_embeddings": tied}))


@pytest.mark.parametrize(
    ("own", "is_added"),
    [
        ([], True),
        ([{"modules": ["norm", "*_layernorm"], "communication": "bf16"}], True),
        ([{"modules": "@lm_head", "compute": "fp32"}], False),
        ([{"modules": ["norm", "Linear"], "communication": "bf16"}], False),
        ([{"modules": "LlamaForCausalLM", "communication": "bf16"}], False),
    ],
)
def test_the_head_is_in_fp32_unless_the_config_names_it(own, is_added):
    """A second override of the head would be an error: it would apply to nothing."""
    added = list(override_of_head(_model(), own))
    assert added == [{"modules": "lm_head", "param": "fp32", "communication": "fp32"}] * is_added
    with torch.device("meta"):
        keys = {
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "zero_optimization": {"stage": 3},
            "zeroamp": {"overrides": [*own, *added]},
        }
        zeroamp.build_plan(_model(), zeroamp.policy_from_config(keys))


def test_a_head_that_shares_the_embedding_is_not_safe_anyway():
    assert list(override_of_head(_model(tied=True), [])) == []


@pytest.mark.parametrize("liger", [False, True])
@pytest.mark.parametrize(("safe", "is_added"), [({}, True), ({"lower_precision_safe_modules": ["Linear"]}, False)])
def test_a_list_of_safe_modules_decides_about_the_head(monkeypatch, liger, safe, is_added):
    """With Liger's kernels, which cannot be traced, a list is the default, and the head gets an override anyway."""
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16", **safe}}
    monkeypatch.setattr(ZeroampTrainerMixin, "filled_config", lambda *_: config)
    trainer = object.__new__(type("Generates", (ZeroampMixin,), {"reward_funcs": []}))
    trainer.args = SimpleNamespace(use_liger_kernel=liger)
    filled = trainer.filled_config(_model())
    assert ("overrides" in filled["zeroamp"]) is (is_added or liger)
    assert ("auto" in filled["torch_autocast"].values()) is (is_added and not liger)


REFERENCE = {"beta": 0.04}
CASES = {
    "GRPO": (Case(trainer="GRPOTrainer"), 2),
    "GRPO with a reference model": (Case(trainer="GRPOTrainer", arguments=REFERENCE), 3),
    "GRPO with LoRA": (Case(trainer="GRPOTrainer", lora={"r": 4}, arguments=REFERENCE), 3),
    "RLOO": (Case(trainer="RLOOTrainer"), 3),
}
"""Name -> the case and a stage."""


@pytest.mark.parametrize("name", slow_but(CASES, "GRPO with a reference model"))
def test_completions_losses_and_weights_are_those_of_ddp(ranks2, tmp_path, name):
    for found, num_lengths in ranks2.run(_differences, *CASES[name], str(tmp_path)):
        assert found == []
        assert num_lengths > 1
