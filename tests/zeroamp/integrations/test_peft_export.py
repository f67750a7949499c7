"""Exported adapters load in peft, merged exports in transformers, with the bits of one process; calls that cannot work
on a wrapped model say what to do."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zeroamp
from tests.models.adapters import LINEARS, Adapted, batch, quietly, train_in_one_process
from tests.processes.adapter_training import AdapterTraining
from tests.processes.training import config
from tests.selection import needs_add_adapter, needs_bitsandbytes, slow_but
from zeroamp.integrations.peft import export_adapter, export_merged

peft = pytest.importorskip("peft", reason="peft is not installed: it makes the adapters")


class _Other(Adapted):
    """A model with adapters that are not LoRA's, with values of their own."""

    def build(self):
        torch.manual_seed(2)
        model = peft.get_peft_model(self.base_model(), self.config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
        return model.train()


class _Norms(_Other):
    def config(self):
        return peft.LNTuningConfig(task_type="CAUSAL_LM")


class _Shared(_Other):
    def config(self):
        return peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)


class _Unmergeable(_Other):
    def config(self):
        return peft.LilyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4)


CASES = {
    "LoRA": Adapted(lora={"r": 3}),  # rows that two ranks do not share evenly
    "LoRA on bf16": Adapted(base="bf16"),
    "DoRA": Adapted(dora=True),
    "DoRA on bf16": Adapted(base="bf16", dora=True),
    "rank-stabilised, with patterns": Adapted(lora={"use_rslora": True, "rank_pattern": {"v_proj": 2}}),
    "a trained copy of the head": Adapted(lora={"modules_to_save": ["lm_head"]}),
    "tied, a trained copy of the embedding": Adapted(tied=True, lora={"modules_to_save": ["embed_tokens"]}),
    "tied": Adapted(tied=True),
    "the embedding": Adapted(lora={"target_modules": ["q_proj", "embed_tokens"]}),
    "single tokens": Adapted(lora={"trainable_token_indices": [1, 2, 3]}),
    "norms": _Norms(),
}
QUANTIZED = {"NF4": Adapted(base="nf4 uint8"), "NF4, DoRA": Adapted(base="nf4 float32", dora=True)}


def _logits(model):
    with torch.no_grad():
        return model.train()(input_ids=batch(9)).logits  # in evaluation bitsandbytes packs weights anew on some CPUs


def _merged_by_peft(model):
    """The names and values of `merge_and_unload()`. A 4-bit base is dequantized, and not quantized again."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Linear4bit" and "lora" in type(module).__module__:
            from peft.utils.integrations import dequantize_bnb_weight

            weight = dequantize_bnb_weight(module.base_layer.weight)
            variant = module.lora_variant.get("default")
            delta = module.get_delta_weight("default")
            values = weight + delta if variant is None else variant.merge_safe(module, "default", weight)
            yield name.removeprefix("base_model.model.") + ".weight", values
        elif type(module).__module__.startswith("bitsandbytes") and not name.endswith(".base_layer"):
            from bitsandbytes.functional import dequantize_4bit

            values = dequantize_4bit(module.weight.data, module.weight.quant_state)
            yield name.removeprefix("base_model.model.") + ".weight", values
    yield from model.merge_and_unload().state_dict().items()


@quietly
def _exported(adapted, stage, folder):
    from transformers import AutoModelForCausalLM

    training = AdapterTraining(adapted, stage).run(2)
    before = training.parameters()
    written = export_adapter(training.model, f"{folder}/adapter")
    export_merged(training.model, f"{folder}/merged")
    after = training.parameters()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    training.run(1, first=4)  # the model still trains
    if dist.get_rank() > 0:
        return changed
    *_, model = train_in_one_process(adapted, [2, 2])
    saved = {name: tensor.contiguous() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    files = load_file(written / "adapter_model.safetensors")
    assert files.keys() == saved.keys()
    assert [name for name in saved if not torch.equal(files[name], saved[name])] == []
    again = peft.PeftModel.from_pretrained(adapted.base_model(), written)
    assert torch.equal(_logits(again), _logits(model))
    expected = {}
    for name, tensor in _merged_by_peft(model):
        expected.setdefault(name, tensor)
    merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged", dtype=torch.float32)
    found = merged.state_dict()
    assert found.keys() <= expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name].float())] == []
    return changed


@pytest.mark.parametrize("name", slow_but([*CASES, *QUANTIZED], "LoRA", "DoRA on bf16", "NF4", "tied"))
def test_adapters_and_merged_weights_are_those_of_one_process(ranks2, tmp_path, name):
    if name in QUANTIZED:
        needs_bitsandbytes(QUANTIZED[name].base.partition(" ")[2])
    stage = 0 if name == "DoRA" else 3
    for changed in ranks2.run(_exported, {**CASES, **QUANTIZED}[name], stage, str(tmp_path)):
        assert changed == []
    assert sorted(os.listdir(tmp_path / "adapter")) == ["adapter_config.json", "adapter_model.safetensors"]
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())


@quietly
def _untied(folder):
    from transformers import AutoModelForCausalLM

    adapted = Adapted(tied=True, lora={"target_modules": ["q_proj", "lm_head"]})
    training = AdapterTraining(adapted).run(1)
    export_merged(training.model, folder)
    if dist.get_rank() > 0:
        return None
    *_, model = train_in_one_process(adapted, [2])
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    embedding = model.get_base_model().model.embed_tokens.weight
    return (
        float((_logits(merged) - _logits(model)).abs().max()),
        torch.equal(merged.model.embed_tokens.weight, embedding),
        merged.config.tie_word_embeddings,
    )


def test_an_adapter_on_one_of_two_tied_weights_unties_them(ranks2, tmp_path):
    """merge_and_unload() would change the embedding too."""
    difference, is_embedding_kept, is_tied = ranks2.run(_untied, str(tmp_path / "merged"))[0]
    assert difference < 1e-6  # (W + BA)x against Wx + BAx, in fp32
    assert is_embedding_kept
    assert not is_tied


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
    export_merged(model, f"{folder}/merged", "second", "bf16")
    errors = []
    for call in (export_adapter, export_merged):
        with pytest.raises(zeroamp.CheckpointError) as error:
            call(model, folder, "third")
        errors.append(str(error.value))
    if dist.get_rank() > 0:
        return None
    torch.manual_seed(5)
    one = _Several().build()
    again = peft.PeftModel.from_pretrained(Adapted().base_model(), written[0])
    again.load_adapter(written[1], "second")
    found = [torch.equal(_logits(again), _logits(one))]
    again.set_adapter("second")
    one.set_adapter("second")
    found.append(torch.equal(_logits(again), _logits(one)))
    merged = load_file(f"{folder}/merged/model.safetensors")
    expected = one.merge_and_unload().state_dict()
    found.append(all(torch.equal(merged[name], expected[name].bfloat16()) for name in merged))
    return [str(path) for path in written], errors, found


def test_several_adapters_have_folders_as_in_peft(ranks2, tmp_path):
    written, errors, found = ranks2.run(_several, str(tmp_path))[0]
    assert written == [str(tmp_path), str(tmp_path / "second")]
    for error in errors:
        assert "no adapter 'third'. It has default, second" in error
    assert found == [True, True, True]


@quietly
def _of_add_adapter(folder):
    """A transformers model after `add_adapter`: its files load as those of a PeftModel."""
    model = Adapted().base_model()
    torch.manual_seed(6)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=list(LINEARS), init_lora_weights=False))
    one = Adapted().base_model()
    torch.manual_seed(6)
    one.add_adapter(peft.LoraConfig(r=2, target_modules=list(LINEARS), init_lora_weights=False))
    model = zeroamp.wrap_model(model.train(), zeroamp.policy_from_config(config(3)))
    export_adapter(model, folder)
    export_merged(model, f"{folder}/merged")
    again = peft.PeftModel.from_pretrained(Adapted().base_model(), folder)
    return torch.equal(_logits(again), _logits(one))


def test_a_model_with_adapters_that_is_no_peft_model(ranks2, tmp_path):
    needs_add_adapter()
    assert all(ranks2.run(_of_add_adapter, str(tmp_path)))


def _error(call):
    try:
        call()
    except zeroamp.ZeroAmpError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("expected an error of zeroamp, got none")


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
    shared, unmergeable = (
        zeroamp.wrap_model(each.build(), zeroamp.policy_from_config({})) for each in (_Shared(), _Unmergeable())
    )
    refused = {
        "save_pretrained": (lambda: model.save_pretrained(folder), "export_adapter(model, folder)"),
        "export_hf": (lambda: zeroamp.export_hf(model, folder), "export_merged(model, folder)"),
        "export_checkpoint": (lambda: zeroamp.export_checkpoint(path, f"{folder}/of"), "export_adapter"),
        "no adapters": (lambda: export_adapter(plain, folder), "no adapters of peft"),
        "other folders": (lambda: export_adapter(model, f"{folder}/{rank}"), "the folder differs"),
        "other adapters": (lambda: export_adapter(model, folder, ["default", "x"][rank]), "no adapter 'x'"),
        "a file": (lambda: export_merged(model, path / "zeroamp.json"), "it is a file"),
        "prompt": (lambda: export_adapter(prompt, folder), "save_pretrained"),
        "merged prompt": (
            lambda: export_merged(prompt, folder),
            "cannot be merged: it changes the input, not weights. Build",
        ),
        "merged VeRA": (
            lambda: export_merged(shared, folder),
            "(VERA) cannot be merged layer by layer: its layers share base_model.vera_A.default. Build the model again",
        ),
        "merged Lily": (
            lambda: export_merged(unmergeable, folder),
            "(LILY) cannot be merged: peft does not implement it. Call export_adapter",
        ),
    }
    configs = {name: adapter_config.to_dict() for name, adapter_config in model.peft_config.items()}
    texts = {name: (_error(call), says) for name, (call, says) in refused.items()}
    assert {name: adapter_config.to_dict() for name, adapter_config in model.peft_config.items()} == configs
    zeroamp.export_hf(plain, f"{folder}/plain")  # still a model without adapters
    training.run(1, first=2)  # nothing of it has changed the model
    return texts, training.differences(train_in_one_process(Adapted(), [2, 2]))


def test_calls_that_cannot_work_say_what_to_do(ranks2, tmp_path):
    for texts, differences in ranks2.run(_refused, str(tmp_path)):
        for name, (text, says) in texts.items():
            assert says in text, f"{name}: {text}"
        assert differences == []
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "plain"]


@quietly
def _replaced(folder):
    model = AdapterTraining(Adapted()).run(1).model
    export_adapter(model, folder)
    if dist.get_rank() == 0:
        (folder / "README.md").write_text("mine")
        (folder / "adapter_config.json").write_text("{}")
    dist.barrier()
    export_adapter(AdapterTraining(Adapted(seed=1)).model, folder)


def test_an_earlier_adapter_is_replaced_and_other_files_stay(ranks2, tmp_path):
    folder = tmp_path / "adapter"
    ranks2.run(_replaced, folder)
    assert sorted(os.listdir(folder)) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
    files = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in files if "lora_B" in name)
    expected = dict(quietly(lambda: Adapted(seed=1).build())().named_parameters())
    assert torch.equal(files[name], expected[name.replace("lora_B", "lora_B.default")])
