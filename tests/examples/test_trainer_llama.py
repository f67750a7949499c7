"""The example of the Trainer runs on 2 ranks, and a second run reads what the first one saved."""

import json

import pytest

from tests.processes.launch import torchrun

pytest.importorskip("transformers", reason="the example is for transformers' Trainer")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

COMMON = ("--bf16", "--report_to", "none", "--learning_rate", "1e-3", "--logging_steps", "8")


def _eval_loss(output):
    line = next(line for line in output.splitlines() if "eval_loss" in line and "=" in line)
    return float(line.partition("=")[2])


@pytest.mark.slow
def test_it_learns_and_reads_its_own_weights(tmp_path):
    script, folder = "examples/trainer_llama.py", tmp_path / "out"
    first = torchrun(script, "--output_dir", folder, "--num_train_epochs", 2, "--save_strategy", "epoch", *COMMON)
    assert {"model.safetensors", "config.json", "training_args.bin", "checkpoint-16"} <= {
        x.name for x in folder.iterdir()
    }
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}))
    second = torchrun(
        script, "--output_dir", tmp_path / "again", "--model", folder, "--zeroamp", config, "--max_steps", 4, *COMMON
    )
    assert _eval_loss(second) < _eval_loss(first) < 5.5  # ln(256) = 5.55 is a guess
