"""`examples/accelerate_llama.py` trains, resumes and saves under torchrun and `accelerate launch`."""

import json
import re

import pytest

from tests.processes.launch import ROOT, module, torchrun

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed: it has the model")

EXAMPLE = "examples/accelerate_llama.py"


def _losses(output):
    return re.findall(r"held-out loss (\d+\.\d+)", output)


def test_it_has_at_most_120_lines():
    assert len((ROOT / EXAMPLE).read_text().splitlines()) <= 120


@pytest.mark.slow
def test_it_trains_resumes_and_saves_on_two_ranks(tmp_path):
    from transformers import LlamaForCausalLM

    losses = _losses(torchrun(EXAMPLE, "--out", tmp_path))
    assert len(losses) == 3
    assert float(losses[-1]) < 0.75 * float(losses[0])
    assert sum(p.numel() for p in LlamaForCausalLM.from_pretrained(tmp_path / "model").parameters()) > 10_000


@pytest.mark.slow
def test_at_stage_1_the_losses_are_those_of_accelerates_ddp_and_accelerate_launch_starts_it(tmp_path):
    config = {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 1},
        "communication_data_type": "fp32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    launch = ("accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", 2, EXAMPLE)
    ours = module(*launch, "--config", tmp_path / "config.json", "--out", tmp_path / "ours")
    theirs = torchrun(EXAMPLE, "--accelerator", "stock", "--out", tmp_path / "theirs")
    assert _losses(ours) == _losses(theirs)
    assert len(_losses(ours)) == 3
