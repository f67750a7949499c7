"""The examples of one file run and learn: as their users start them, or on the fixtures' ranks, which start faster."""

import json
import re

import pytest

from tests.processes.launch import ROOT, module, on_ranks, script, torchrun

MOST_LINES = {
    "minimal": 40, "accelerate_llama": 120, "fabric_llama": 120, "sft_lora": 120, "dpo": 120, "grpo": 120, "moe": 120,
    "pipeline": 120,
}  # fmt: skip


def test_examples_are_short():
    lines = {name: len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) for name in MOST_LINES}
    assert {name: number for name, number in lines.items() if number > MOST_LINES[name]} == {}


def _losses(output, before="loss"):
    return [float(loss) for loss in re.findall(rf"{before} (\d+\.\d+)", output)]


@pytest.mark.slow
def test_the_shortest_example_trains(ranks2):
    """It trains on two ranks and prints the ledger. `tests/test_readme.py` runs the script of the README."""
    output = on_ranks(ranks2, "examples/minimal.py")
    losses = _losses(output)
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2
    assert "model-wide:fp32" in output


@pytest.mark.slow
def test_the_tour_runs_twice_in_the_same_folder(tmp_path):
    for _ in range(2):
        assert "every dtype is the expected one" in script(ROOT / "examples" / "tour.py", cwd=tmp_path)
        assert (tmp_path / "runs" / "tour" / "run.jsonl").read_text().count('"kind": "step"') == 10


@pytest.mark.slow
def test_accelerates_loop_has_the_losses_of_its_ddp(ranks2, tmp_path):
    """Accelerate's loop at stage 1 has the losses of its DDP and its launcher starts it."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed: it has the model")
    config = {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 1},
        "communication_data_type": "fp32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    example = "examples/accelerate_llama.py"
    launch = ("accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", 2, example)
    ours = _losses(module(*launch, "--config", tmp_path / "config.json", "--out", tmp_path / "ours"), "held-out loss")
    stock = on_ranks(ranks2, example, "--accelerator", "stock", "--out", tmp_path / "theirs")
    theirs = _losses(stock, "held-out loss")
    assert ours == theirs
    assert len(ours) == 3
    assert ours[-1] < 0.75 * ours[0]
    assert ranks2.run(_size_of_saved, tmp_path / "ours" / "model")[0] > 10_000


def _size_of_saved(folder):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder).num_parameters()


@pytest.mark.slow
def test_fabrics_loop_trains_under_torchrun_and_lightning_starts_ranks_itself(ranks2, tmp_path):
    pytest.importorskip("lightning", reason="lightning is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed: it has the model")
    example = ROOT / "examples" / "fabric_llama.py"
    output = on_ranks(ranks2, example, "--accelerator", "cpu", "--out", tmp_path / "checkpoint")
    losses = _losses(output)
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert "generated" in output
    output = script(example, "--accelerator", "cpu", "--steps", 2, "--out", tmp_path / "other", cwd=tmp_path)
    assert output.count("step 2: loss") == 1


@pytest.mark.slow
def test_transformers_trainer_learns_and_reads_its_own_weights(ranks2, tmp_path):
    pytest.importorskip("transformers", reason="the example is for transformers' Trainer")
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    common = ("--bf16", "--report_to", "none", "--learning_rate", "1e-3", "--logging_steps", "8")
    example, folder, config = "examples/trainer_llama.py", tmp_path / "out", tmp_path / "config.json"
    saving = ("--output_dir", folder, "--num_train_epochs", 2, "--save_strategy", "epoch")
    first = on_ranks(ranks2, example, *saving, *common)
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "training_args.bin", "checkpoint-16"} <= names
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}))
    more = ("--model", folder, "--zeroamp", config, "--max_steps", 4)
    second = on_ranks(ranks2, example, "--output_dir", tmp_path / "again", *more, *common)
    [before], [after] = (re.findall(r"eval_loss\s*= *(\d+\.\d+)", output) for output in (first, second))
    assert float(after) < float(before) < 5.5  # ln(256) = 5.55 is a guess


def _needs_trl():
    for name in ("transformers", "trl", "peft", "datasets", "yaml"):
        pytest.importorskip(name, reason="the extra examples is not installed")


@pytest.mark.slow
def test_lora_lowers_the_held_out_loss_and_goes_on_from_a_checkpoint(ranks2, tmp_path):
    _needs_trl()
    torchrun("examples/sft_lora.py", "--steps", 8, "--out", tmp_path)
    record = json.loads((tmp_path / "losses.json").read_text())
    assert record["held_out_after"] < record["held_out_before"] - 0.3
    assert len(record["losses"]) == 8
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    on_ranks(ranks2, "examples/sft_lora.py", "--steps", 10, "--out", tmp_path, "--resume", "auto")
    again = json.loads((tmp_path / "losses.json").read_text())
    assert again["losses"][:8] == record["losses"]
    assert len(again["losses"]) == 10


def _first_and_last(output):
    return map(float, re.search(r"first (\S+) -> last (\S+)", output).groups())


@pytest.mark.slow
def test_dpo_raises_the_margin_of_rewards(ranks2, tmp_path):
    _needs_trl()
    first, last = _first_and_last(on_ranks(ranks2, "examples/dpo.py", "--steps", 10, "--out", tmp_path))
    assert last > first + 0.1
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
def test_grpo_raises_the_reward(ranks2, tmp_path):
    """GRPO raises the reward and an fp32 head narrows the gap to an engine."""
    _needs_trl()
    output = on_ranks(ranks2, "examples/grpo.py", "--steps", 15, "--out", tmp_path)
    first, last = _first_and_last(output)
    assert last > first
    gaps = dict(re.findall(r"engine in (\w+): mean gap of log-probabilities (\S+)", output))
    assert 0 < float(gaps["fp32"]) < float(gaps["bf16"])


@pytest.mark.slow
def test_experts_are_in_bf16_and_the_loss_falls(ranks2):
    _needs_trl()
    output = on_ranks(ranks2, "examples/moe.py", "--steps", 12)
    losses = _losses(output)
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    row, *_ = re.findall(r"^MixtralExperts .*", output, re.MULTILINE)  # of each table, where one does not fit
    assert "bf16" in row


@pytest.mark.slow
def test_a_pipeline_of_two_stages_trains_and_saves_all_parts(ranks4, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: it has the model")
    from torch.distributed.checkpoint import FileSystemReader

    import zeroamp

    out = tmp_path / "parts"
    output = on_ranks(ranks4, "examples/pipeline.py", "--model", "tiny", "--steps", 8, "--out", out)
    losses = _losses(output)
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    saved = FileSystemReader(zeroamp.latest_checkpoint(out)).read_metadata().state_dict_metadata
    assert {"model.model.embed_tokens.weight", "model.lm_head.weight"} < saved.keys()
