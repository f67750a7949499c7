"""`zeroamp sensitivity`: a saved model, a batch or a text, a table on stdout and numbers in a file."""

import json

import pytest
import torch
import torch.distributed as dist

from tests.models.small import HfLlama
from tests.processes.cli import run


@pytest.fixture
def saved(tmp_path):
    """A folder with a model of transformers and a tokenizer of its vocabulary, a config and a batch."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    HfLlama().save_pretrained(tmp_path / "llama")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "llama")
    (tmp_path / "zero.json").write_text(json.dumps({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}))
    (tmp_path / "text.txt").write_text(" ".join(f"w{(7 * number) % 61}" for number in range(100)))
    tokens = torch.arange(64).view(4, 16)
    save_file({"input_ids": tokens, "labels": tokens.clone()}, tmp_path / "batch.safetensors")
    yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(saved, *arguments):
    return run("sensitivity", saved / "zero.json", "--model", saved / "llama", *arguments)


def test_a_batch_of_a_saved_model_is_measured(saved, monkeypatch):
    """The table is on stdout, in a terminal of 100 columns; the progress on stderr; all numbers in the file."""
    monkeypatch.setenv("COLUMNS", "100")
    file = saved / "found.json"
    code, out, err = measure(saved, "--batch", saved / "batch.safetensors", "--json", file)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    found = json.loads(file.read_text())
    assert {row["group"] for row in found["rows"]} >= {"self_attn.q_proj", "mlp.down_proj", "Embedding"}
    body = out[out.index("---") :]  # the title and the headers are wrapped at the width of the terminal
    assert body.splitlines()[1].split()[0] == found["rows"][0]["group"]
    assert "sensitivity" not in out
    assert err == "" or "run 1 of" in err


def test_a_text_is_cut_into_samples(saved):
    code, out, _ = measure(saved, "--text", saved / "text.txt", "--seq", 16, "--groups", "depth", "--budget", "1e-9")
    assert code == 0
    assert "first third of the blocks" in out
    assert "Nothing helps" in out.replace("\n", " ")


def test_several_processes_are_an_error(saved, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = measure(saved, "--batch", saved / "batch.safetensors")
    assert (code, out) == (1, "")
    assert "runs in one process, but torchrun started 2" in err


def test_a_short_text_and_a_wrong_file_are_errors(saved):
    code, out, err = measure(saved, "--text", saved / "text.txt", "--seq", 64)
    assert (code, out) == (1, "")
    assert "has 100 tokens, but two samples of 64 are needed" in err
    code, _, err = measure(saved, "--batch", saved / "text.txt")
    assert code == 1
    assert "text.txt is not a safetensors file" in err
