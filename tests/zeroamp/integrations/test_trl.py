"""TRL's trainers on zeroamp train as they do under DDP with bf16 autocast, bit for bit; adapters come back in peft."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

import zeroamp
from tests.models.adapters import quietly
from tests.processes.trl_training import STOCK, Case, build, differences, llama, outcome, silence, trained
from tests.selection import slow_but

pytest.importorskip("trl", reason="trl is not installed: its trainers are tested")
pytest.importorskip("peft", reason="peft is not installed: it makes the adapters")

FULL = Case()
LORA = Case(dtype="bfloat16", lora={"r": 4, "target_modules": "all-linear"})
DPO = Case(trainer="DPOTrainer", reference="float32")
DPO_LORA = Case(trainer="DPOTrainer", dtype="bfloat16", lora={"r": 4})


def _check(ranks2, tmp_path, case, *stages, **more):
    for found in ranks2.run(differences, case, stages, str(tmp_path), **more):
        assert not any(found.values()), found


@pytest.mark.parametrize("stage", slow_but((0, 1, 2, 3), 3))
def test_full_fine_tuning_is_that_of_ddp(ranks2, tmp_path, stage):
    _check(ranks2, tmp_path, FULL, stage, is_evaluated=True)


@pytest.mark.slow  # stage 3 is in the fast test of saved adapters too
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_lora_on_a_bf16_base_is_that_of_ddp(ranks2, tmp_path, stage):
    _check(ranks2, tmp_path, LORA, stage, is_evaluated=True)


OPTIONS = {
    "a tied head": Case(model={"tie_word_embeddings": True}),
    "a base stored in bf16, of which nothing is trained but LoRA with dropout": Case(
        dtype="bfloat16", lora={"r": 4, "lora_dropout": 0.1}
    ),
    "without activation checkpointing": Case(arguments={"gradient_checkpointing": False}),
    "losses of completions only": Case(is_text=True),
    "packed rows, seen as one sequence": Case(arguments={"packing": True, "packing_strategy": "wrapped"}),
    "packed rows without padding": Case(arguments={"packing": True}),
    "without padding": Case(arguments={"padding_free": True, "max_length": None}),
    "the DFT loss": Case(arguments={"loss_type": "dft"}),
    "NEFTune": Case(arguments={"neftune_noise_alpha": 5.0}),
    "a reward model": Case(trainer="RewardTrainer"),
    "KTO": Case(trainer="KTOTrainer", reference="float32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_trainers(ranks2, tmp_path, name):
    _check(ranks2, tmp_path, OPTIONS[name], 3)


@pytest.mark.slow
def test_accumulation_is_that_of_ddp_where_micro_batches_are_summed_before_ranks(ranks2, tmp_path):
    """Stage 1 reduces once per step, as DDP does, and in fp32 rounds nothing."""
    case = Case(arguments={"gradient_accumulation_steps": 2}, zeroamp={"communication_data_type": "fp32"})
    _check(ranks2, tmp_path, case, 0, 1)


@pytest.mark.slow
def test_the_class_list_would_have_other_bits(ranks2, tmp_path):
    """What "auto" is the default for: the gradient of the head, which TRL adds in fp32, is rounded to bf16."""
    listed = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    for found in ranks2.run(differences, Case(zeroamp={"torch_autocast": listed}), (3,), str(tmp_path)):
        assert "lm_head.weight" in found[3]


@pytest.mark.parametrize("stage", slow_but((0, 2, 3), 3))
@pytest.mark.parametrize(
    "case", slow_but((DPO, DPO_LORA, Case(trainer="DPOTrainer", reference="bfloat16")), DPO), ids=str
)
def test_dpo_is_that_of_ddp(ranks2, tmp_path, case, stage):
    """With a reference model, which is wrapped too, or with adapters that are switched off for it."""
    _check(ranks2, tmp_path, case, stage, is_evaluated=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [DPO, DPO_LORA, Case(trainer="DPOTrainer")], ids=["reference", "lora", "none"])
def test_dpo_whose_reference_is_computed_before(ranks2, tmp_path, case):
    """Without a reference model, and before any training, the model itself is the reference."""
    _check(ranks2, tmp_path, case, 3, precompute_ref_log_probs=True)


@pytest.mark.slow
def test_dpo_whose_reference_follows_the_model(ranks2, tmp_path):
    _check(ranks2, tmp_path, DPO, 3, sync_ref_model=True, ref_model_sync_steps=1)


@quietly
def _adapters(folder):
    """Train with saves, resume, and load the adapter in peft. Returns what differs, and the files of a checkpoint."""
    import peft

    silence()
    folder = Path(folder)
    keys = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    stock = build(LORA, STOCK, folder / "stock", max_steps=2)
    stock.train()
    trainer = build(LORA, 3, folder, **keys)
    trainer.train()
    trainer.save_model()
    whole = outcome(trainer)
    resumed = trained(LORA, 3, folder, resume=str(folder / "checkpoint-1"), **keys)
    found = {
        "DDP": whole.differs(outcome(stock)),
        "resumed": [n for n, p in resumed.parameters.items() if not torch.equal(p, whole.parameters[n])],
        "losses": resumed.losses != whole.losses,
    }
    if dist.get_rank() > 0:
        return found, [], []
    loaded = peft.PeftModel.from_pretrained(llama(LORA), folder)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):  # the stock model's forward is under it already
        outputs = [model.eval()(input_ids=tokens).logits.float() for model in (loaded, stock.model)]
    found["outputs"] = not torch.equal(*outputs)
    files = sorted(path.name for path in (folder / "checkpoint-2").iterdir())
    state = FileSystemReader(zeroamp.latest_checkpoint(folder / "checkpoint-2" / "zeroamp"))
    return found, files, list(state.read_metadata().state_dict_metadata)


@pytest.mark.slow
def test_adapters_are_saved_resumed_and_loaded_in_peft(ranks2, tmp_path):
    (found, files, names), (others, _, _) = ranks2.run(_adapters, str(tmp_path))
    assert not any(found.values()), found
    assert not any(others.values()), others
    assert "adapter_model.safetensors" in files
    assert "adapter_config.json" in files
    assert not any(name.startswith("model") for name in files)
    assert any("lora_A" in name for name in names)
    assert not [name for name in names if "embed_tokens" in name or "base_layer" in name]


@quietly
def build_adapted():
    import peft

    return peft.get_peft_model(llama(LORA), peft.LoraConfig(task_type="CAUSAL_LM", **LORA.lora))


@quietly
def _best(folder):
    from safetensors.torch import load_file

    silence()
    keys = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
    }  # fmt: skip
    trainer = build(LORA, 3, folder, **keys)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    saved = load_file(best / "adapter_model.safetensors")
    whole = {name.replace(".default.", "."): value for name, value in outcome(trainer).parameters.items()}
    return best.name, saved.keys() == whole.keys() and all(torch.equal(saved[n], v) for n, v in whole.items())


@pytest.mark.slow
def test_the_best_adapter_is_loaded_at_the_end(ranks2, tmp_path):
    for name, is_equal in ranks2.run(_best, str(tmp_path)):
        assert name != "checkpoint-4"  # the metric is upside down
        assert is_equal


@quietly
def _from_an_adapter(folder, stage):
    """DPO goes on from a trained adapter: a copy of it, called "ref", is the reference."""
    silence()
    case = Case(trainer="DPOTrainer", dtype="bfloat16")
    torch.manual_seed(5)
    adapted = build_adapted()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    trainer = build(case, stage, folder, model=adapted)
    trainer.train()
    if stage != STOCK:
        trainer.save_model()
    return outcome(trainer), sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("adapter_model*"))


def _both(folder):
    stock, _ = _from_an_adapter(f"{folder}/stock", STOCK)
    found, files = _from_an_adapter(f"{folder}/3", 3)
    return found.differs(stock), files


@pytest.mark.slow
def test_dpo_goes_on_from_an_adapter(ranks2, tmp_path):
    for found, files in ranks2.run(_both, str(tmp_path)):
        assert found == []
        assert files == ["adapter_model.safetensors", "ref/adapter_model.safetensors"]


@quietly
def _refused(folder, **more):
    silence()
    with pytest.raises(zeroamp.ConfigError) as error:
        build(FULL, 3, folder, **more)
    return str(error.value)


def test_liger_kernels_are_refused(ranks2, tmp_path):
    for text in ranks2.run(_refused, str(tmp_path), use_liger_kernel=True):
        assert "- use_liger_kernel: " in text
        assert "Leave it out" in text


@quietly
def _offloaded(folder):
    silence()
    outcomes = []
    for offloads in (False, True):
        trainer = build(FULL, 3, f"{folder}/{offloads}")
        trainer.args.activation_offloading = offloads  # set here: TRL's constructor needs an accelerator for it
        trainer.train()
        outcomes.append(outcome(trainer))
    return outcomes[1].differs(outcomes[0])


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
