"""Text for the fine-tuning example: read documents, hold some out, pack the rest, deal them to the ranks."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedTokenizerBase

# One short line for every conversation. Without it, SmolLM2's template writes a default system line of 21 tokens
# into each item, and a third of all training tokens would be that line.
SYSTEM_PROMPT = "Answer briefly."
# The label that cross-entropy leaves out of the loss (torch's default ignore_index).
IGNORED_LABEL = -100


class DataError(ValueError):
    """The text given cannot be trained on; the message says where, what was found, what is valid, what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One piece of text. Documents with the same `key` always land on the same side of the held-out split."""

    key: str
    text: str


def read_documents(data: Path | None, tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Distinct documents of the file `data`, or of the chatterbot-corpus package when `data` is None.

    Exact copies are dropped: the corpus repeats ten of its items about a hundred times each, and a held-out
    loss over text that was also trained on would measure memory.
    """
    documents = _read_chatterbot(tokenizer) if data is None else read_jsonl(data, tokenizer)
    return list(dict.fromkeys(documents))


def split_documents(
    documents: Sequence[Document], *, held_out_fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """(training documents, held-out documents), both shuffled, the same on every rank for the same `seed`.

    Whole keys are held out, so that no question of the held-out side was trained on with another answer.
    """
    keys = sorted({document.key for document in documents})
    if len(keys) < 2:
        raise DataError(
            f"data: found {len(keys)} distinct document(s); at least 2 are needed, one to train on and one to hold "
            "out. Give a file with more lines, or lines that differ."
        )
    shuffler = random.Random(seed)
    shuffler.shuffle(keys)
    num_held_out = min(max(1, round(held_out_fraction * len(keys))), len(keys) - 1)
    held_out_keys = set(keys[:num_held_out])
    train = [document for document in documents if document.key not in held_out_keys]
    held_out = [document for document in documents if document.key in held_out_keys]
    shuffler.shuffle(train)
    shuffler.shuffle(held_out)
    return train, held_out


def pack(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, seq_len: int, name: str) -> torch.Tensor:
    """Join the documents' tokens and cut them into rows: int64 [num_sequences, seq_len].

    The last, short row is dropped. A document may go on in the next row, and attention crosses the seam between two
    documents. Both are usual for packing without padding, where every token of a row is trained on. `name` is used in
    the error only.
    """
    texts = [document.text for document in documents]
    # The rendered text already holds its special tokens, so the tokenizer must not add a second set.
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    tokens = [token for row in rows for token in row]
    num_sequences = len(tokens) // seq_len
    if num_sequences == 0:
        raise DataError(
            f"data: the {name} part has {len(tokens)} tokens, less than one sequence of {seq_len}. Each part needs "
            f"at least {seq_len} tokens: give more text or a smaller --seq-len."
        )
    return torch.tensor(tokens[: num_sequences * seq_len], dtype=torch.int64).view(num_sequences, seq_len)


def training_batches(
    sequences: torch.Tensor,
    *,
    micro_batch_size: int,
    indices: range,
    world_size: int,
    seed: int,
    start: int = 0,
) -> Iterator[torch.Tensor]:
    """Endless micro-batches of this rank: int64 [micro_batch_size, seq_len]; reshuffled each time the data is used up.

    All ranks use the same endless order of rows. From row `start` on, an optimizer step takes as many rows as all its
    micro-batches have, and the micro-batch of index i the i-th part of them. `indices` are this rank's, in each step:
    `TrainStep.micro_batch_indices`. So a step has the same micro-batches on any number of ranks, if it has the same
    number of rows.
    """
    if len(sequences) < world_size:
        raise DataError(
            f"data: {len(sequences)} training sequence(s) for {world_size} ranks; each rank needs at least one. "
            "Give more text, a smaller --seq-len, or fewer ranks."
        )
    order = itertools.islice(_endless_order(len(sequences), seed), start, None)
    num_rows = world_size * len(indices) * micro_batch_size
    while True:
        rows = list(itertools.islice(order, num_rows))
        for index in indices:
            own = rows[index * micro_batch_size : (index + 1) * micro_batch_size]
            yield torch.stack([sequences[row] for row in own])


def _endless_order(num_rows: int, seed: int) -> Iterator[int]:
    """One permutation of the rows after another."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(num_rows, generator=generator).tolist()


def evaluation_batches(
    sequences: torch.Tensor, *, micro_batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of `sequences` as (input_ids, labels), both int64 [micro_batch_size, seq_len].

    Every rank gets the same number of batches, because each forward is a collective. The rows that fill up the
    last ones have only ignored labels, so the set that is measured does not depend on the number of ranks.
    """
    num_filler = -len(sequences) % (micro_batch_size * world_size)
    input_ids = torch.cat([sequences, sequences[:1].expand(num_filler, -1)])
    labels = input_ids.clone()
    labels[len(sequences) :] = IGNORED_LABEL
    own_ids, own_labels = input_ids[rank::world_size], labels[rank::world_size]
    yield from zip(own_ids.split(micro_batch_size), own_labels.split(micro_batch_size), strict=True)


def read_jsonl(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Documents of a JSON-lines file: each line has "text", or "question" and "answer", or "messages".

    Raises DataError naming the line where a line is none of these.
    """
    if not path.is_file():
        raise DataError(f"--data {path}: no such file. Give a JSON-lines file, or leave --data out for the corpus.")
    documents = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                documents.append(_jsonl_document(line, f"{path}, line {number}", tokenizer))
    return documents


def _jsonl_document(line: str, where: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error}). Write one JSON object per line.") from error
    match record:
        case {"text": str(text)} if text:
            return Document(key=text, text=text + (tokenizer.eos_token or ""))
        case {"question": str(question), "answer": str(answer)} if question and answer:
            return _conversation([question, answer], tokenizer)
        case {"messages": [{"role": str(), "content": str()}, *_] as messages} if all(map(_is_message, messages)):
            return Document(key=messages[0]["content"], text=_render(messages, tokenizer))
    found = f"keys {sorted(record)}" if isinstance(record, dict) else f"a JSON {type(record).__name__}"
    raise DataError(
        f'{where}: found {found}. Valid is {{"text": "…"}}, {{"question": "…", "answer": "…"}} or {{"messages": '
        '[{"role": "user", "content": "…"}, …]}, with non-empty strings. Correct or remove the line.'
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(field), str) for field in ("role", "content"))


def _read_chatterbot(tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    # find_spec finds the package's folder without running the package, whose imports are not needed here.
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "data: the package chatterbot-corpus, which holds the default text, is not installed. Run "
            "`pip install chatterbot-corpus`, or give your own text with --data file.jsonl."
        )
    documents = []
    for path in sorted(Path(spec.submodule_search_locations[0], "data", "english").glob("*.yml")):
        for turns in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            # A last question without an answer is left out: turns alternate, and the assistant has the last word.
            turns = turns[: len(turns) // 2 * 2]
            documents.append(_conversation(turns, tokenizer))
    return documents


def _conversation(turns: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Document:
    """The turns question, answer, question, answer, … as one document; its key is the first question."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return Document(key=turns[0].strip().casefold(), text=_render(messages, tokenizer))


def _render(messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template is None:
        raise DataError(
            "data: questions and answers need a tokenizer with a chat template, and this model's tokenizer has none. "
            'Give a chat model with --model, or lines with "text" in --data.'
        )
    return tokenizer.apply_chat_template(messages, tokenize=False)
