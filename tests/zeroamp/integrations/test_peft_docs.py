"""The examples of docs/peft.md run as they stand."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.adapters import Adapted, batch, quietly, trained
from tests.processes.launch import ROOT
from tests.processes.training import config
from tests.selection import needs_bitsandbytes

peft = pytest.importorskip("peft", reason="peft is not installed: it makes the adapters")

TRAIN, QUANTIZED, EXPORT, MERGE, CHECKPOINT, IGNORED, REDUCE = range(7)


def _blocks():
    return re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / "docs/peft.md").read_text(), re.DOTALL)


def _imports():
    """Return the imports of the first block, which the page's other blocks go on with."""
    return "\n".join(line for line in _blocks()[TRAIN].splitlines() if line.startswith(("import ", "from ")))


def _names():
    """Return what the page leaves to its reader."""
    loader = [{"input_ids": batch(i), "labels": batch(i)} for i in (dist.get_rank(), 2 + dist.get_rank())]
    return {
        "base": "base",
        "loader": loader,
        "policy": zeroamp.policy_from_config(config(3)),
    }


@quietly
def _run(folder, numbers):
    """Run the blocks of these numbers in a folder with a base model in it; return what they defined."""
    blocks, names, before = _blocks(), _names(), Path.cwd()
    os.chdir(folder)
    try:
        if dist.get_rank() == 0:
            Adapted().base_model().save_pretrained("base")
        dist.barrier()
        for number in numbers:
            torch.manual_seed(0)
            exec(f"{_imports()}\n{blocks[number]}", names)
    finally:
        os.chdir(before)
    return names


def _adapters(folder):
    names = _run(folder, [TRAIN, EXPORT, CHECKPOINT])
    dist.barrier()
    again = quietly(_reload)(folder)
    ours = {name: zeroamp.full_parameter(p) for name, p in trained(names["model"]).items()}
    if dist.get_rank() == 0:
        quietly(_check_merged)(folder, names["model"])
    return [name for name, value in ours.items() if not torch.equal(again[name], value)]


def _reload(folder):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    return peft.PeftModel.from_pretrained(base, folder / "out/adapter").state_dict()


def _check_merged(folder, trained_model):
    """Merge on one rank. The result is the base where no adapter is, and loads without peft."""
    from transformers import AutoModelForCausalLM

    blocks = _blocks()
    exec(f"{_imports()}\n{blocks[MERGE]}".replace("out/", f"{folder}/out/"), {"base": folder / "base"})
    merged = AutoModelForCausalLM.from_pretrained(folder / "out/merged").state_dict()
    base = AutoModelForCausalLM.from_pretrained(folder / "base").state_dict()
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in trained(trained_model)}
    changed = {name.removesuffix(".weight") for name in merged if not torch.equal(merged[name], base[name])}
    assert changed == adapted


def test_training_export_and_checkpoint(ranks2, tmp_path):
    assert ranks2.run(_adapters, tmp_path) == [[], []]


def _quantized(folder):
    """The block of a 4-bit base, then an optimizer step and the exports."""
    blocks = _blocks()
    steps = blocks[TRAIN][blocks[TRAIN].index("parameters =") :]
    names = _run(folder, [QUANTIZED])
    exec(steps, names)
    quietly(exec)(blocks[EXPORT].replace("out/", f"{folder}/out/"), names)
    linear = names["model"].get_base_model().model.layers[0].self_attn.q_proj.base_layer
    return type(linear).__name__, linear.weight.dtype, tuple(linear.weight.to_local().shape)


def test_a_base_that_from_pretrained_quantizes(ranks2, tmp_path):
    needs_bitsandbytes()
    for name, dtype, shape in ranks2.run(_quantized, tmp_path):
        assert (name, dtype) == ("Linear4bit", torch.uint8)
        assert shape == (64 * 64 // 2 // 2, 1)  # two numbers a byte, half of the rows
    assert (tmp_path / "out/adapter/adapter_config.json").exists()


@quietly
def _ignored():
    blocks, names = _blocks(), _names()
    names["model"] = Adapted(lora={"modules_to_save": ["embed_tokens"]}).build()
    names["model"].get_base_model().model.embed_tokens.original_module.requires_grad_(False)
    block = blocks[IGNORED].replace("embed_tokens.weight", "modules_to_save.default.weight")
    exec(f"{_imports()}\n{block}", names)
    model = names["model"]
    (fqn,) = names["ignored_names"]
    names["train"] = zeroamp.TrainStep(model, torch.optim.AdamW(trained(model).values(), lr=1e-2))
    for each in names["loader"]:
        names["loss"] = model(**each).loss
        exec(blocks[REDUCE], names)
    return model.get_parameter(fqn).tolist()


def test_ignored_parameters_are_alike_where_the_caller_averages(ranks2):
    first, second = ranks2.run(_ignored)
    assert first == second
