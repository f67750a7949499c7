"""Exported adapters load in peft with the bits of one process; calls that cannot work on a wrapped model say why."""

import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zeroamp
from tests.models.adapters import Adapted, batch, quietly, train_in_one_process
from tests.processes.adapter_training import AdapterTraining
from tests.processes.training import config, same_bits
from tests.selection import needs_bitsandbytes, slow_but
from zeroamp.integrations.peft import export_adapter, iter_merged_weights

peft = pytest.importorskip("peft", reason="peft is not installed: it makes the adapters")


class _Norms(Adapted):
    """Adapters that are not LoRA's: norms, with values of their own."""

    def build(self):
        torch.manual_seed(2)
        model = peft.get_peft_model(self.base_model(), peft.LNTuningConfig(task_type="CAUSAL_LM"))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
        return model.train()


CASES = {
    "LoRA": Adapted(lora={"r": 3}),  # rows that two ranks do not share evenly
    "DoRA on bf16": Adapted(base="bf16", dora=True),
    "rank-stabilised, with patterns": Adapted(lora={"use_rslora": True, "rank_pattern": {"v_proj": 2}}),
    "tied": Adapted(tied=True),
    "tied, a trained copy of the embedding": Adapted(tied=True, lora={"modules_to_save": ["embed_tokens"]}),
    "the embedding": Adapted(lora={"target_modules": ["q_proj", "embed_tokens"]}),
    "single tokens": Adapted(lora={"trainable_token_indices": [1, 2, 3]}),
    "norms": _Norms(),
    "NF4": Adapted(base="nf4 uint8"),
    "NF4, DoRA": Adapted(base="nf4 float32", dora=True),
}


def _logits(model):
    with torch.no_grad():
        return model.train()(input_ids=batch(9)).logits  # in evaluation bitsandbytes packs weights anew on some CPUs


@quietly
def _exported(adapted, stage, folder):
    training = AdapterTraining(adapted, stage).run(2)
    before = training.parameters()
    written = export_adapter(training.model, f"{folder}/adapter")
    after = training.parameters()
    changed = same_bits(before, after)
    training.run(1, first=4)  # the model still trains
    if dist.get_rank() > 0:
        return changed
    *_, model = train_in_one_process(adapted, [2, 2])
    saved = {name: tensor.contiguous() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    files = load_file(written / "adapter_model.safetensors")
    assert same_bits(files, saved) == []
    again = peft.PeftModel.from_pretrained(adapted.base_model(), written)
    assert torch.equal(_logits(again), _logits(model))
    return changed


@pytest.mark.parametrize("name", slow_but(CASES, "LoRA", "NF4", "tied, a trained copy of the embedding"))
def test_adapters_are_those_of_one_process(ranks2, tmp_path, name):
    if "NF4" in name:
        needs_bitsandbytes(CASES[name].base.partition(" ")[2])
    stage = 0 if name == "DoRA on bf16" else 3
    for changed in ranks2.run(_exported, CASES[name], stage, str(tmp_path)):
        assert changed == []
    assert sorted(os.listdir(tmp_path / "adapter")) == ["adapter_config.json", "adapter_model.safetensors"]


class _Several(Adapted):
    def build(self):
        model = super().build()
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        return model


@quietly
def _several(folder):
    torch.manual_seed(5)
    model = AdapterTraining(_Several()).model
    written = [export_adapter(model, folder), export_adapter(model, folder, "second")]
    assert written == [folder, folder / "second"]
    with pytest.raises(zeroamp.CheckpointError, match="no adapter 'third'. It has default, second"):
        export_adapter(model, folder, "third")
    if dist.get_rank() > 0:
        return
    torch.manual_seed(5)
    one = _Several().build()
    again = peft.PeftModel.from_pretrained(Adapted().base_model(), written[0])
    again.load_adapter(written[1], "second")
    assert torch.equal(_logits(again), _logits(one))
    again.set_adapter("second")
    one.set_adapter("second")
    assert torch.equal(_logits(again), _logits(one))


def test_several_adapters_have_folders_as_in_peft(ranks2, tmp_path):
    ranks2.run(_several, tmp_path)


@quietly
def _refused(folder):
    rank = dist.get_rank()
    training = AdapterTraining(Adapted()).run(1)
    model = training.model
    path = zeroamp.save_checkpoint(f"{folder}/checkpoints", model, training.train)
    plain = zeroamp.wrap_model(Adapted().base_model(), zeroamp.policy_from_config(config(3)))
    prompt = peft.get_peft_model(
        Adapted().base_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    prompt = zeroamp.wrap_model(prompt, zeroamp.policy_from_config({}))
    configs = {name: adapter_config.to_dict() for name, adapter_config in model.peft_config.items()}
    for call, says in (
        (lambda: model.save_pretrained(folder), r"export_adapter\(model, folder\)"),
        (lambda: zeroamp.export_hf(model, folder), r"export_adapter\(model, folder\)"),
        (lambda: export_adapter(plain, folder), "is not a PeftModel"),
        (lambda: export_adapter(model, f"{folder}/{rank}"), "same folder on all ranks"),
        (lambda: export_adapter(model, folder, ["default", "x"][rank]), "no adapter 'x'"),
        (lambda: export_adapter(model, path / "zeroamp.json"), "File exists"),
        (lambda: export_adapter(prompt, folder), "save_pretrained"),
    ):
        with pytest.raises(zeroamp.ZeroAmpError, match=says):
            call()
    assert {name: adapter_config.to_dict() for name, adapter_config in model.peft_config.items()} == configs
    zeroamp.export_hf(plain, f"{folder}/plain")  # still a model without adapters
    training.run(1, first=2)  # nothing of it has changed the model
    assert training.differences(train_in_one_process(Adapted(), [2, 2])) == []


def test_calls_that_cannot_work_say_what_to_do(ranks2, tmp_path):
    ranks2.run(_refused, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "plain"]


def _perturbed(adapted):
    """The model with factors that are not zero."""
    model = adapted.build()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@quietly
def _merged(adapted):
    model = zeroamp.wrap_model(_perturbed(adapted), zeroamp.policy_from_config(config(3)))
    found = {name: tensor.clone() for name, tensor in iter_merged_weights(model, bucket_bytes=4000)}
    train = zeroamp.TrainStep(model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad]))
    train.backward(model(**model.dummy_inputs).logits.square().mean(), is_last=False)
    with pytest.raises(zeroamp.StepError, match="iter_merged_weights was called"):
        next(iter_merged_weights(model))
    return found


@pytest.mark.parametrize("name", ["LoRA", "tied", "rank-stabilised, with patterns"])
def test_merged_weights_are_those_that_peft_merges(ranks2, tmp_path, name):
    """peft merges fp32 weights in fp32; bf16 ones it would round twice."""
    quietly(lambda: _perturbed(CASES[name]).merge_and_unload().to(torch.bfloat16).save_pretrained(tmp_path))()
    expected = load_file(tmp_path / "model.safetensors")
    for ours in ranks2.run(_merged, CASES[name]):
        assert same_bits(ours, expected) == []


@quietly
def _cannot_merge(adapted):
    model = zeroamp.wrap_model(adapted.build(), zeroamp.policy_from_config(config(3)))
    with pytest.raises(zeroamp.CheckpointError, match="export_adapter"):
        next(iter_merged_weights(model))


@pytest.mark.parametrize("name", ["DoRA on bf16", "the embedding", "tied, a trained copy of the embedding"])
def test_what_cannot_be_merged_names_export_adapter(ranks2, name):
    ranks2.run(_cannot_merge, CASES[name])
