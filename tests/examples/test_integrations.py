"""The examples of LoRA, preferences and experts run on two ranks as their users start them, and learn."""

import importlib.util
import json
import re

import pytest

from tests.processes.launch import ROOT, torchrun

REQUIRED = ("transformers", "trl", "peft", "datasets", "yaml")
if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"the examples extra is not installed: {missing}", allow_module_level=True)


@pytest.mark.parametrize("name", ["sft_lora", "dpo", "grpo", "moe"])
def test_it_has_at_most_120_lines(name):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 120


@pytest.mark.slow
def test_lora_lowers_the_held_out_loss_and_goes_on_from_a_checkpoint(tmp_path):
    torchrun("examples/sft_lora.py", "--steps", 8, "--out", tmp_path)
    record = json.loads((tmp_path / "losses.json").read_text())
    assert record["held_out_after"] < record["held_out_before"] - 0.3
    assert len(record["losses"]) == 8
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    torchrun("examples/sft_lora.py", "--steps", 10, "--out", tmp_path, "--resume")
    again = json.loads((tmp_path / "losses.json").read_text())
    assert again["losses"][:8] == record["losses"]
    assert len(again["losses"]) == 10


@pytest.mark.slow
def test_dpo_raises_the_margin_of_rewards(tmp_path):
    output = torchrun("examples/dpo.py", "--steps", 10, "--out", tmp_path)
    first, last = map(float, re.search(r"first (\S+) -> last (\S+)", output).groups())
    assert last > first + 0.1
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_grpo_raises_the_reward_and_an_fp32_head_narrows_the_gap_to_an_engine(tmp_path):
    output = torchrun("examples/grpo.py", "--steps", 15, "--out", tmp_path)
    first, last = map(float, re.search(r"first (\S+) -> last (\S+)", output).groups())
    assert last > first
    gaps = dict(re.findall(r"engine in (\w+): mean gap of log-probabilities (\S+)", output))
    assert 0 < float(gaps["fp32"]) < float(gaps["bf16"])


@pytest.mark.slow
def test_experts_are_in_bf16_and_the_loss_falls():
    output = torchrun("examples/moe.py", "--steps", 12)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    row, *_ = re.findall(r"^MixtralExperts .*", output, re.MULTILINE)  # of each table, where one does not fit
    assert "bf16" in row
