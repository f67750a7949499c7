"""The fine-tuning example's text: reading, splitting, packing, and dealing to ranks."""

import importlib.util
import itertools
import json
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


@pytest.fixture(scope="module")
def tokenizer():
    return _weights.load_model("tiny", seed=0)[1]


def documents(*texts):
    return [_data.Document(key=text, text=text) for text in texts]


def write(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines), errors="surrogateescape")
    return path


def test_rows_are_the_joined_tokens_without_the_short_end(tokenizer):
    rows = _data.pack(documents("abc", "defg", "h"), tokenizer, seq_len=3, name="training")
    assert rows.dtype == torch.int64
    assert [tokenizer.decode(row) for row in rows] == ["abc", "def"]


def test_the_split_is_deterministic_and_keeps_equal_keys_together():
    items = [_data.Document(key=str(index // 3), text=str(index)) for index in range(60)]
    train, held_out = _data.split_documents(items, held_out_fraction=0.1, seed=1)
    assert len(held_out) == 6
    assert sorted(train + held_out, key=lambda item: int(item.text)) == items
    assert not {item.key for item in train} & {item.key for item in held_out}
    assert (train, held_out) == _data.split_documents(items, held_out_fraction=0.1, seed=1)
    assert held_out != _data.split_documents(items, held_out_fraction=0.1, seed=2)[1]


def test_a_pass_deals_each_row_once():
    """A pass deals each row once and the next one in another order."""
    rows = torch.arange(19)[:, None]
    deal = partial(_data.training_batches, rows, micro_batch_size=1, world_size=2, seed=0)
    first, second = (list(itertools.islice(deal(indices=range(rank, rank + 1)), 19)) for rank in range(2))
    dealt = [int(row) for pair in zip(first, second, strict=True) for row in pair]
    assert sorted(dealt[:19]) == sorted(dealt[19:]) == list(range(19))
    assert dealt[:19] != dealt[19:]


def test_only_answers_have_labels_where_the_prompt_is_masked(tokenizer, tmp_path):
    turns = (("user", "Q"), ("assistant", "Aa"), ("user", "R"), ("assistant", "Bb"))
    messages = [{"role": role, "content": text} for role, text in turns]
    path = write(tmp_path, json.dumps({"messages": messages}), '{"text": "t"}')
    documents = _data.read_documents(path, tokenizer)
    pack = partial(_data.pack_labelled, documents, tokenizer, seq_len=1, name="training")
    masked, whole = pack(mask_prompt=True), pack(mask_prompt=False)
    tokens, labels = masked[:, 0], masked[:, 1]
    assert tokens.equal(whole[:, 0])
    assert tokens.equal(whole[:, 1])
    has_label = labels != _data.IGNORED_LABEL
    assert labels[has_label].equal(tokens[has_label])
    assert tokenizer.decode(labels[has_label]) == "Aa<|im_end|>\nBb<|im_end|>\nt<|im_end|>"


def test_a_loss_is_divided_by_the_tokens_of_a_mean_micro_batch():
    """All ranks and micro-batches of an optimizer step have the same divisor."""
    rows = torch.arange(2 * 8 * 5).view(8, 2, 5)
    for row in range(8):
        rows[row, 1, : row % 5] = _data.IGNORED_LABEL
    deal = partial(_data.labelled_batches, rows, micro_batch_size=2, world_size=2, seed=0)
    dealt = [list(itertools.islice(deal(indices=range(2 * rank, 2 * rank + 2)), 2)) for rank in range(2)]
    num_predicted = sum(int((labels[:, 1:] != _data.IGNORED_LABEL).sum()) for rank in dealt for _, labels, _ in rank)
    assert {divisor for rank in dealt for *_, divisor in rank} == {num_predicted / 4}
    nothing = rows.clone()
    nothing[:, 1] = _data.IGNORED_LABEL
    batches = _data.labelled_batches(nothing, micro_batch_size=1, indices=range(1), world_size=1, seed=0)
    assert next(batches)[2] == 1  # not 0, by which a loss would be nan


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


def test_a_conversation_is_known_by_its_first_question(tokenizer, tmp_path):
    """Not by a system message, which many lines share, and in any case."""
    roles, asked = ("system", "user", "assistant"), ("Why?", "why? ", "When?")
    turns = [zip(roles, ("Be brief.", question, "Yes."), strict=True) for question in asked]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in each]}) for each in turns]
    found = _data.read_jsonl(write(tmp_path, *lines), tokenizer)
    assert [document.key for document in found] == ["why?", "why?", "when?"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "not valid JSON"),
        ('{"text": "caf\udce9"}', "not UTF-8 .* Save the file as UTF-8"),  # Latin-1
        ("[1]", "but has a JSON list"),
        ('{"messages": [{"role": "user", "content": "a"}, "b"]}', r'but has among its messages "b"\.'),
        (
            '{"messages": [{"role": "usr", "content": "a"}]}',
            r'the roles system, .* but has among its messages \{"role": "u',
        ),
        ('{"messages": []}', r"but has no message\."),
    ],
)
def test_a_json_line_of_no_kind_is_refused_by_its_number(tokenizer, tmp_path, line, found):
    path = write(tmp_path, '{"text": "good"}', line)
    with pytest.raises(_data.DataError, match=rf"data\.jsonl, line 2(: | must be .*){found}"):
        _data.read_jsonl(path, tokenizer)


def _with_template(template):
    tokenizer = _weights.load_model("tiny", seed=0)[1]
    tokenizer.chat_template = template
    return tokenizer


_without_template = partial(_with_template, None)


REFUSED = {
    "too little text for one row": (
        lambda folder: _data.pack(documents("abc"), _without_template(), seq_len=4, name="held-out"),
        r"the held-out part must have at least 4 tokens, one sequence, but has 3.*--seq-len",
    ),
    "one document, which cannot be split": (
        lambda folder: _data.split_documents(documents("a"), held_out_fraction=0.1, seed=0),
        r"at least 2 distinct documents, .* but has 1",
    ),
    "fewer rows than ranks": (
        lambda folder: next(
            _data.training_batches(torch.zeros(3, 8), micro_batch_size=1, indices=range(1), world_size=4, seed=0)
        ),
        "at least one training sequence per rank, but has 3 for 4 ranks",
    ),
    "a missing file": (
        lambda folder: _data.read_documents(folder / "none.jsonl", _without_template()), r"none\.jsonl: no such file",
    ),
    "a folder": (lambda folder: _data.read_documents(folder, _without_template()), "is a folder"),
    "a conversation that the chat template refuses": (
        lambda folder: _data.read_documents(
            write(folder, '{"question": "a", "answer": "b"}'), _with_template("{{ raise_exception('no system') }}")
        ),
        "line 1: the tokenizer's chat template refuses a conversation .*no system",
    ),
    "answers only, and none": (
        lambda folder: _data.pack_labelled(
            _data.read_documents(
                write(folder, '{"messages": [{"role": "user", "content": "a"}]}'),
                _with_template(_weights.CHATML_TEMPLATE),
            ),
            _with_template(_weights.CHATML_TEMPLATE), seq_len=2, name="training", mask_prompt=True,
        ),
        "the training part has no answer",
    ),
    "questions without a chat template": (
        lambda folder: _data.read_documents(write(folder, '{"question": "a", "answer": "b"}'), _without_template()),
        "chat template",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_cannot_be_used_are_refused(tmp_path, name):
    call, says = REFUSED[name]
    with pytest.raises(_data.DataError, match=says):
        call(tmp_path)


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
