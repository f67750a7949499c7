"""TRL's trainers on zeroamp train as they do under DDP with bf16 autocast, bit for bit; adapters come back in peft."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

import zeroamp
from tests.models.adapters import quietly
from tests.processes.trainer import outcome
from tests.processes.training import same_bits
from tests.processes.trl_training import STOCK, Case, build, differences, llama, silence, trained

pytest.importorskip("trl", reason="trl is not installed: its trainers are tested")
pytest.importorskip("peft", reason="peft is not installed: it makes the adapters")

FULL = Case()
LORA = Case(dtype="bfloat16", lora={"r": 4, "target_modules": "all-linear"})
DPO = Case(trainer="DPOTrainer", reference="float32")
DPO_LORA = Case(trainer="DPOTrainer", dtype="bfloat16", lora={"r": 4})
EVALUATED = {"is_evaluated": True}
FAST = {
    "full fine-tuning": (FULL, (3,), EVALUATED),
    "DPO": (DPO, (3,), EVALUATED),
}
SLOW = {
    "full fine-tuning at other stages": (FULL, (0, 1, 2), {}),
    "LoRA on a bf16 base": (LORA, (0, 1, 2), EVALUATED),  # stage 3 is in the test of saved adapters
    "accumulation": (Case(arguments={"gradient_accumulation_steps": 2}), (0, 1), {}),
    "DPO with a bf16 reference": (Case(trainer="DPOTrainer", reference="bfloat16"), (0, 2), {}),
    "DPO with LoRA, whose adapters are switched off for the reference": (DPO_LORA, (0, 2, 3), EVALUATED),
    # Without a reference model, and before any training, the model itself is the reference.
    "DPO that computes the reference before": (Case(trainer="DPOTrainer"), (3,), {"precompute_ref_log_probs": True}),
    "DPO with LoRA that computes the reference before": (DPO_LORA, (3,), {"precompute_ref_log_probs": True}),
    "DPO whose reference follows the model": (DPO, (3,), {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "a tied head": (Case(model={"tie_word_embeddings": True}), (3,), {}),
    "LoRA with dropout": (Case(dtype="bfloat16", lora={"r": 4, "lora_dropout": 0.1}), (3,), {}),
    "without activation checkpointing": (Case(arguments={"gradient_checkpointing": False}), (3,), {}),
    "losses of completions only": (Case(is_text=True), (3,), {}),
    "packed rows without padding": (Case(arguments={"packing": True}), (3,), {}),
    "the DFT loss": (Case(arguments={"loss_type": "dft"}), (3,), {}),
    "NEFTune": (Case(arguments={"neftune_noise_alpha": 5.0}), (3,), {}),
    "a reward model": (Case(trainer="RewardTrainer"), (3,), {}),
    "KTO": (Case(trainer="KTOTrainer", reference="float32"), (3,), {}),
}  # fmt: skip
"""Name -> the case, stages, and more of the trainer's arguments."""


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_trainer_has_the_bits_of_ddp(ranks2, tmp_path, name):
    case, stages, more = (FAST | SLOW)[name]
    for found in ranks2.run(differences, case, stages, str(tmp_path), **more):
        assert found == {stage: [] for stage in stages}


@quietly
def _adapters(folder):
    """Train with saves, resume, and load the adapter in peft."""
    import peft

    silence()
    keys = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    stock = build(LORA, STOCK, folder / "stock", max_steps=2)
    stock.train()
    trainer = build(LORA, 3, folder, **keys)
    trainer.train()
    trainer.save_model()
    whole = outcome(trainer)
    assert whole.differences(outcome(stock), norms=False) == []
    resumed = trained(LORA, 3, folder, resume=str(folder / "checkpoint-1"), **keys)
    assert resumed.differences(whole, norms=False) == []
    if dist.get_rank() > 0:
        return
    loaded = peft.PeftModel.from_pretrained(llama(LORA), folder)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):  # the stock model's forward is under it already
        outputs = [model.eval()(input_ids=tokens).logits.float() for model in (loaded, stock.model)]
    assert torch.equal(*outputs)


@pytest.mark.slow
def test_adapters_are_saved_resumed_and_loaded_in_peft(ranks2, tmp_path):
    ranks2.run(_adapters, tmp_path)
    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= files
    assert not any(name.startswith("model") for name in files)
    state = FileSystemReader(zeroamp.latest_checkpoint(tmp_path / "checkpoint-2" / "zeroamp"))
    names = state.read_metadata().state_dict_metadata
    assert any("lora_A" in name for name in names)
    assert not [name for name in names if "embed_tokens" in name or "base_layer" in name]


@quietly
def _best(folder):
    from safetensors.torch import load_file

    silence()
    keys = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
        "save_only_model": True,
    }  # fmt: skip
    trainer = build(LORA, 3, folder, **keys)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    saved = load_file(best / "adapter_model.safetensors")
    whole = {name.replace(".default.", "."): value for name, value in outcome(trainer).parameters.items()}
    assert best.name != "checkpoint-4"  # the metric is upside down
    assert same_bits(saved, whole) == []


@pytest.mark.slow
def test_the_best_adapter_is_loaded_at_the_end_from_its_file(ranks2, tmp_path):
    ranks2.run(_best, str(tmp_path))


@quietly
def _from_an_adapter(folder):
    """DPO goes on from a trained adapter: a copy of it, called "ref", is the reference."""
    import peft

    silence()
    case, outcomes = Case(trainer="DPOTrainer", dtype="bfloat16"), []
    for stage in (STOCK, 3):
        torch.manual_seed(5)
        adapted = peft.get_peft_model(llama(LORA), peft.LoraConfig(task_type="CAUSAL_LM", **LORA.lora))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        trainer = build(case, stage, folder, model=adapted)
        trainer.train()
        outcomes.append(outcome(trainer))
    trainer.save_model()
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("adapter_model*"))
    return outcomes[1].differences(outcomes[0], norms=False), files


@pytest.mark.slow
def test_dpo_goes_on_from_an_adapter(ranks2, tmp_path):
    for found, files in ranks2.run(_from_an_adapter, str(tmp_path)):
        assert found == []
        assert files == ["adapter_model.safetensors", "ref/adapter_model.safetensors"]


@quietly
def _offloaded(folder):
    silence()
    outcomes = []
    for offloads in (False, True):
        trainer = build(FULL, 3, f"{folder}/{offloads}")
        trainer.args.activation_offloading = offloads  # set here: TRL's constructor needs an accelerator for it
        trainer.train()
        outcomes.append(outcome(trainer))
    return outcomes[1].differences(outcomes[0], norms=False)


@pytest.mark.slow
def test_activation_offloading_has_the_bits_of_a_run_without(ranks2, tmp_path):
    assert ranks2.run(_offloaded, str(tmp_path)) == [[], []]


def test_the_mixin_of_a_trainer_of_transformers_is_refused():
    from trl import SFTTrainer

    from zeroamp.integrations.transformers import ZeroampMixin

    with pytest.raises(zeroamp.ConfigError, match="zeroamp.integrations.trl.ZeroampMixin"):
        type("Mine", (ZeroampMixin, SFTTrainer), {})(zeroamp={})


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # trl's default sets it
def test_arguments_have_the_defaults_of_trl():
    from transformers import HfArgumentParser

    from zeroamp.integrations.trl import ZeroampSFTConfig

    (args,) = HfArgumentParser(ZeroampSFTConfig).parse_args_into_dataclasses(
        ["--output_dir", "x", "--use_cpu", "--zeroamp", "config.json"]
    )
    assert args.learning_rate == 2e-5
    assert args.zeroamp == "config.json"
