"""GRPO and RLOO on zeroamp: the completions, losses and weights of DDP under bf16 autocast."""

import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.adapters import quietly
from tests.processes.trl_training import STOCK, Case, classes, llama, outcome, silence, tokenizer, words
from tests.selection import slow_but

pytest.importorskip("trl", reason="trl is not installed: its trainers are tested")
from zeroamp.integrations.transformers import ZeroampMixin as ZeroampTrainerMixin
from zeroamp.integrations.trl import ZeroampMixin, override_of_head


@quietly
def _trained(trainer, stage, folder, lora, **arguments):
    """Train 5 steps; return the outcome and the completions. Ranks have completions of different lengths."""
    import peft
    from accelerate.state import AcceleratorState, GradientState
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    silence()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    case = Case(trainer=trainer)
    cls, arguments_cls = classes(case, stage)
    args = arguments_cls(
        output_dir=str(folder), use_cpu=True, bf16=True, per_device_train_batch_size=4, num_generations=4, max_steps=5,
        learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no", max_grad_norm=0.0, disable_tqdm=True,
        dataloader_pin_memory=False, max_completion_length=8, **arguments,
    )  # fmt: skip
    draw, generated = random.Random(3), []

    def reward(completions, **_):
        generated.extend(completions)
        return [len(set(text)) / 10 for text in completions]

    path = Path(folder) / "model"  # the trainer loads a reference model from it
    if dist.get_rank() == 0:
        llama(case).save_pretrained(path)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    given = {} if stage == STOCK else {"zeroamp": {"zero_optimization": {"stage": stage}}}
    if lora:
        given["peft_config"] = peft.LoraConfig(task_type="CAUSAL_LM", r=4)
    data = Dataset.from_list([{"prompt": words(draw, 3, 12)} for _ in range(16)])
    trainer = cls(model, args=args, train_dataset=data, reward_funcs=reward, processing_class=tokenizer(), **given)
    trainer.train()
    return outcome(trainer), generated


def _differences(trainer, stages, folder, lora, arguments):
    expected, completions = _trained(trainer, STOCK, Path(folder) / "stock", lora, **arguments)
    found = {}
    for stage in stages:
        ours, generated = _trained(trainer, stage, Path(folder) / str(stage), lora, **arguments)
        same = generated == completions and ours.losses == expected.losses
        found[stage] = [] if same and not ours.differs(expected) else [ours.losses, ours.differs(expected)]
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


@pytest.mark.parametrize(("safe", "is_added"), [({}, True), ({"lower_precision_safe_modules": ["Linear"]}, False)])
def test_a_list_of_safe_modules_decides_about_the_head(monkeypatch, safe, is_added):
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16", **safe}}
    monkeypatch.setattr(ZeroampTrainerMixin, "filled_config", lambda *_: config)
    trainer = object.__new__(type("Generates", (ZeroampMixin,), {"reward_funcs": []}))
    assert ("overrides" in trainer.filled_config(_model())["zeroamp"]) is is_added


CASES = {
    "GRPO": ("GRPOTrainer", (2, 3), False, {}),
    "GRPO with a reference model": ("GRPOTrainer", (2, 3), False, {"beta": 0.04}),
    "GRPO with LoRA": ("GRPOTrainer", (3,), True, {"beta": 0.04}),
    "RLOO": ("RLOOTrainer", (3,), False, {}),
}


@pytest.mark.parametrize("name", slow_but(CASES, "GRPO with a reference model"))
def test_completions_losses_and_weights_are_those_of_ddp(ranks2, tmp_path, name):
    trainer, stages, lora, arguments = CASES[name]
    for found, num_lengths in ranks2.run(_differences, trainer, stages, str(tmp_path), lora, arguments):
        assert found == {stage: [] for stage in stages}
        assert num_lengths > 1
