"""The fine-tuning example's text: reading, splitting, packing, and dealing to ranks."""

import importlib.util
import itertools
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

REQUIRED = ("transformers", "tokenizers", "yaml")
if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"the examples extra is not installed: {missing}", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import _data  # noqa: E402
import _weights  # noqa: E402

import zeroamp  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return _weights.load_model("tiny", seed=0)[1]


def documents(*texts):
    return [_data.Document(key=text, text=text) for text in texts]


def write(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_rows_are_the_joined_tokens_without_the_short_end(tokenizer):
    rows = _data.pack(documents("abc", "defg", "h"), tokenizer, seq_len=3, name="training")
    assert rows.dtype == torch.int64
    assert [tokenizer.decode(row) for row in rows] == ["abc", "def"]


def test_too_little_text_for_one_row_is_refused(tokenizer):
    with pytest.raises(
        _data.DataError, match=r"the held-out part must have at least 4 tokens, one sequence, but has 3.*--seq-len"
    ):
        _data.pack(documents("abc"), tokenizer, seq_len=4, name="held-out")


def test_the_split_is_deterministic_and_keeps_equal_keys_together():
    items = [_data.Document(key=str(index // 3), text=str(index)) for index in range(60)]
    train, held_out = _data.split_documents(items, held_out_fraction=0.1, seed=1)
    assert len(held_out) == 6
    assert sorted(train + held_out, key=lambda item: int(item.text)) == items
    assert not {item.key for item in train} & {item.key for item in held_out}
    assert (train, held_out) == _data.split_documents(items, held_out_fraction=0.1, seed=1)
    assert held_out != _data.split_documents(items, held_out_fraction=0.1, seed=2)[1]


def test_one_document_cannot_be_split():
    with pytest.raises(_data.DataError, match=r"at least 2 distinct documents, .* but has 1"):
        _data.split_documents(documents("a"), held_out_fraction=0.1, seed=0)


def _first_pass(num_rows, world_size, rank, micro_batch_size=2):
    rows = torch.arange(num_rows)[:, None]
    batches = _data.training_batches(
        rows, micro_batch_size=micro_batch_size, indices=range(rank, rank + 1), world_size=world_size, seed=0
    )
    num_batches = num_rows // world_size // micro_batch_size
    return torch.cat(list(itertools.islice(batches, num_batches))).flatten().tolist()


def test_ranks_train_on_different_rows_and_together_on_all():
    first, second = (_first_pass(12, world_size=2, rank=rank) for rank in range(2))
    assert len(first) == len(second) == 6
    assert sorted(first + second) == list(range(12))


@pytest.mark.parametrize("num_rows", [16, 19])  # a pass ends at the end of a step, or within one
def test_a_step_has_the_same_rows_whichever_ranks_take_it(num_rows):
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}

    def rows_of_steps(num_steps, world_size, start):
        steps = zeroamp.policy_from_config(config, world_size=world_size).gradient_accumulation_steps
        rows, num_batches = torch.arange(num_rows)[:, None], steps * num_steps
        deal = partial(_data.training_batches, rows, micro_batch_size=2, world_size=world_size, seed=0, start=start)
        ranks = [deal(indices=range(rank, steps * world_size, world_size)) for rank in range(world_size)]
        of_ranks = [torch.stack(list(itertools.islice(batches, num_batches))) for batches in ranks]
        # [step, micro-batch in the step, row]: of rank r, micro-batch j is number j * world_size + r
        of_steps = torch.stack([batches.view(num_steps, steps, 2) for batches in of_ranks], dim=2)
        return of_steps.reshape(num_steps, -1, 2).tolist()

    expected = rows_of_steps(7, world_size=2, start=0)
    assert len({str(rows) for rows in expected}) > 1
    elastic = rows_of_steps(2, world_size=2, start=0)
    elastic += rows_of_steps(3, world_size=1, start=16)
    elastic += rows_of_steps(1, world_size=4, start=40)
    elastic += rows_of_steps(1, world_size=2, start=48)
    assert elastic == expected


def test_training_goes_on_after_the_last_row_in_another_order():
    rows = torch.arange(6)[:, None]
    batches = _data.training_batches(rows, micro_batch_size=6, indices=range(1), world_size=1, seed=0)
    first, second = (next(batches).flatten().tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second


def test_fewer_rows_than_ranks_are_refused():
    batches = _data.training_batches(torch.zeros(3, 8), micro_batch_size=1, indices=range(1), world_size=4, seed=0)
    with pytest.raises(_data.DataError, match=r"at least one training sequence per rank, but has 3 for 4 ranks"):
        next(batches)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_evaluation_counts_every_row_once_whatever_the_number_of_ranks(world_size):
    rows = torch.arange(9)[:, None]
    per_rank = [
        list(_data.evaluation_batches(rows, micro_batch_size=2, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in per_rank}) == 1  # each forward is a collective
    assert {len(input_ids) for batches in per_rank for input_ids, _ in batches} == {2}
    labels = torch.cat([labels for batches in per_rank for _, labels in batches]).flatten()
    assert sorted(labels[labels != _data.IGNORED_LABEL].tolist()) == list(range(9))


def test_json_lines_of_each_kind_are_read_once(tokenizer, tmp_path):
    path = write(
        tmp_path,
        '{"text": "plain"}',
        "",
        '{"question": "Why?", "answer": "So."}',
        '{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]}',
        '{"text": "plain"}',
    )
    plain, pair, messages = _data.read_documents(path, tokenizer)
    assert plain.text == "plain<|im_end|>"
    assert pair.key == "why?"
    assert pair.text.endswith("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n")
    assert messages.text == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nMe.<|im_end|>\n"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "not valid JSON"),
        ("[1]", "but has a JSON list"),
        ('{"question": "Why?"}', r"but has keys \['question'\]"),
        ('{"text": ""}', r"but has keys \['text'\]"),
        ('{"messages": []}', r"but has keys \['messages'\]"),
        ('{"messages": [{"role": "user", "content": "a"}, "b"]}', r"but has keys \['messages'\]"),
    ],
)
def test_a_json_line_of_no_kind_is_refused_by_its_number(tokenizer, tmp_path, line, found):
    path = write(tmp_path, '{"text": "good"}', line)
    with pytest.raises(_data.DataError, match=rf"data\.jsonl, line 2(: | must be .*){found}"):
        _data.read_jsonl(path, tokenizer)


def test_a_missing_file_is_refused(tokenizer, tmp_path):
    with pytest.raises(_data.DataError, match=r"none\.jsonl: no such file"):
        _data.read_documents(tmp_path / "none.jsonl", tokenizer)


def test_questions_need_a_chat_template(tmp_path):
    tokenizer = _weights.load_model("tiny", seed=0)[1]
    tokenizer.chat_template = None
    with pytest.raises(_data.DataError, match="chat template"):
        _data.read_documents(write(tmp_path, '{"question": "Why?", "answer": "So."}'), tokenizer)


@pytest.mark.skipif(
    importlib.util.find_spec("chatterbot_corpus") is None,
    reason="needs the package chatterbot-corpus (the demo's text)",
)
def test_the_corpus_is_read_without_its_repeats(tokenizer):
    items = _data.read_documents(None, tokenizer)
    assert len(items) == len(set(items)) > 800
    assert all("<|im_start|>assistant\n" in item.text for item in items)
    # Its most frequent question stands there 121 times, with one answer.
    assert sum(item.key == "my printer is not printing." for item in items) == 1
