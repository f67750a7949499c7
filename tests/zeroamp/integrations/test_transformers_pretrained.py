"""`from_pretrained`: each rank reads its own part, and the model is the one that transformers' own reads."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroamp
from tests.processes.trainer import DDP, examples, llama, outcome, parameters_of, trainer_of

pytest.importorskip("transformers", reason="the models are transformers'")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _wrapped(folder, **kwargs):
    from transformers import AutoModelForCausalLM

    from zeroamp.integrations.transformers import from_pretrained

    lines = _Lines()
    logging.getLogger("zeroamp").addHandler(lines)
    try:
        policy = zeroamp.policy_from_config({"zero_optimization": {"stage": 3}})
        model = from_pretrained(AutoModelForCausalLM, folder, policy, **kwargs)
    finally:
        logging.getLogger("zeroamp").removeHandler(lines)
    facts = model.training, model.generation_config.max_length, {p.dtype for p in model.parameters()}
    return parameters_of(model), dict(model.named_buffers()), facts, lines.lines


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_is_the_one_that_transformers_reads(ranks2, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    model = llama(tie_word_embeddings=tied).bfloat16()
    model.generation_config.max_length = 17
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for parameters, buffers, facts, lines in ranks2.run(_wrapped, tmp_path):
        named = dict(expected.named_parameters())
        assert parameters.keys() == named.keys()
        assert all(torch.equal(parameters[name], value) for name, value in named.items())
        assert all(torch.equal(buffers[name], value) for name, value in expected.named_buffers())
        assert facts == (False, 17, {torch.float32})
        assert not any("tensors" in line for line in lines)


def test_what_the_files_lack_is_initialised_and_named(ranks2, tmp_path):
    from safetensors.torch import load_file, save_file

    model = llama()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["other.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    (first, *_, lines), (second, *_, other_lines) = ranks2.run(_wrapped, tmp_path)
    assert torch.equal(first["lm_head.weight"], second["lm_head.weight"])
    assert 0 < first["lm_head.weight"].std() < 0.05  # transformers draws with 0.02
    assert any(
        "lacks 1 tensors of the model, which were initialised instead: lm_head.weight. Train" in x for x in lines
    )
    assert any("has 1 tensors that the model does not have. They were not read: other.weight" in x for x in lines)
    assert not any("tensors" in line for line in other_lines)  # the first rank logs


def _trained(folder, deferred):
    from transformers import AutoModelForCausalLM

    from zeroamp.integrations.transformers import from_pretrained

    given = {"train_dataset": examples(12), "eval_dataset": examples(4)}
    model = from_pretrained(AutoModelForCausalLM, folder) if deferred else AutoModelForCausalLM.from_pretrained(folder)
    assert all(parameter.is_meta for parameter in model.parameters()) is deferred
    trainer = trainer_of(3 if deferred else DDP, Path(folder) / "out", model=model, trainer_arguments=given)
    trainer.train()
    return outcome(trainer)


def _from_meta(folder):
    return _trained(folder, True).differences(_trained(folder, False), norms=False)


def test_a_trainer_fills_a_model_on_the_meta_device_when_it_wraps_it(ranks2, tmp_path):
    llama(seed=4).save_pretrained(tmp_path)
    assert ranks2.run(_from_meta, tmp_path) == [[], []]


def test_what_cannot_be_read_in_part_is_refused(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from zeroamp.integrations.transformers import from_pretrained
    from zeroamp.integrations.transformers.pretrained import refuse_unfilled

    llama().save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="device_map"):  # of transformers' from_config
        from_pretrained(AutoModelForCausalLM, tmp_path, device_map="auto")
    config = AutoConfig.from_pretrained(tmp_path)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(zeroamp.WrapError, match="are quantized"):
        from_pretrained(AutoModelForCausalLM, tmp_path, config=config)
    with pytest.raises(zeroamp.WrapError, match="^0, inside a .*is on the meta device and its files were not read"):
        refuse_unfilled(nn.Sequential(from_pretrained(AutoModelForCausalLM, tmp_path)))
