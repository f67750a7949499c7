"""`zeroamp sensitivity`: a saved model, a batch or a text, a table on stdout and numbers in a file."""

import json
import re

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
    assert "run 1 of 27, " in err


def test_a_text_is_cut_into_samples(saved):
    code, out, _ = measure(saved, "--text", saved / "text.txt", "--seq", 16, "--groups", "depth", "--budget", "1e-9")
    assert code == 0
    assert "first third of the blocks" in out
    assert "Nothing helps" in out.replace("\n", " ")


def _on_a_rank(folder, *arguments):
    return run("sensitivity", f"{folder}/zero.json", "--model", f"{folder}/llama", *arguments)


def test_ranks_share_the_samples_and_the_first_prints(ranks2, saved):
    """The numbers are those of one process: the halves of the ranks' parts are the halves of the batch."""
    batch = ("--batch", saved / "batch.safetensors", "--groups", "lm_head", "--json")
    assert measure(saved, *batch, saved / "one.json")[0] == 0
    (code, out, err), other = ranks2.run(_on_a_rank, str(saved), *map(str, batch), str(saved / "two.json"))
    assert (code, other[:2]) == (0, (0, ""))
    one, two = (json.loads((saved / f"{name}.json").read_text()) for name in ("one", "two"))
    assert two["noise"] == pytest.approx(one["noise"], rel=1e-4)
    # Autocast rounds the gradient of each rank's part to bf16.
    assert two["low_change"] == pytest.approx(one["low_change"], rel=0.02)
    assert [row["group"] for row in two["rows"]] == [row["group"] for row in one["rows"]]
    assert "lm_head" in out
    assert "2 groups: 9 runs, each a forward and backward of 1 batch, and" in err
    assert err.index("2 groups: 9 runs") < err.index("run 1 of 9")
    assert "run 1 of 9" not in other[2]


def test_samples_that_ranks_cannot_share_are_an_error(ranks2, saved):
    results = ranks2.run(_on_a_rank, str(saved), "--text", f"{saved}/text.txt", "--seq", "8", "--samples", "5")
    for code, out, err in results:
        assert (code, out) == (1, "")
        assert "2 ranks cannot share 5 samples equally. Pass a multiple of 2, by --samples" in err


def test_a_file_that_cannot_be_written_stops_all_ranks(ranks2, saved):
    """Before anything is measured, and also for the rank that would not write it."""
    batch = ("--batch", f"{saved}/batch.safetensors")
    for option in ("--json", "--html"):
        for code, out, err in ranks2.run(_on_a_rank, str(saved), *batch, option, f"{saved}/zero.json/found"):
            assert (code, out) == (1, "")
            assert f"zeroamp sensitivity failed on rank 0: {option}: '{saved}/zero.json/found' cannot be written" in err
            assert "run 1 of" not in err
    assert "is a folder" in measure(saved, *batch, "--json", saved)[2]


def test_the_page_has_the_numbers_of_json(saved):
    """And a folder that does not exist yet is made."""
    pytest.importorskip("plotly")
    files = {option: saved / "new" / f"found.{option}" for option in ("json", "html")}
    arguments = (each for option, path in files.items() for each in (f"--{option}", path))
    code, _, err = measure(saved, "--batch", saved / "batch.safetensors", "--groups", "lm_head", *arguments)
    assert code == 0, err
    found, page = json.loads(files["json"].read_text()), files["html"].read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(data) == found
    assert found["choices"][0] == {"in_fp32": [], "bytes": 0, "gradient_change": found["low_change"]}
    assert [choice["in_fp32"] for choice in found["choices"][1:3]] == [["lm_head"], ["between the modules"]]
    assert all(0 < change < 1 for change in found["parameter_changes"].values())
    assert "connect-src 'none'" in page


def test_quick_measures_the_ten_groups_with_the_most_bytes(saved):
    """A LLaMA has eleven groups: the smallest, of the modules without parameters, is not measured."""
    code, out, err = measure(saved, "--batch", saved / "batch.safetensors", "--quick")
    assert code == 0, err
    assert "10 groups: 25 runs, each a forward and backward of 1 batch, and" in err
    assert "LlamaRMSNorm" in out
    assert "between the modules" not in out


def test_a_short_text_and_a_wrong_file_are_errors(saved):
    code, out, err = measure(saved, "--text", saved / "text.txt", "--seq", 64)
    assert (code, out) == (1, "")
    assert "has 100 tokens, but two samples of 64 are needed" in err
    code, _, err = measure(saved, "--batch", saved / "text.txt")
    assert code == 1
    assert "text.txt is not a safetensors file" in err
