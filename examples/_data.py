"""Text for the fine-tuning example: reads documents, holds some out, packs them into rows, splits rows over ranks."""

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
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

# One short line for every conversation. Without it, SmolLM2's template adds a default system line of 21 tokens, which
# would be a third of all training tokens.
SYSTEM_PROMPT = "Answer briefly."
# The label that cross-entropy leaves out of the loss (torch's default ignore_index).
IGNORED_LABEL = -100
ROLES = ("system", "developer", "user", "assistant", "tool")


class DataError(ValueError):
    """The given text cannot be used for training. The message names the place, the problem and the remedy."""


class _TemplateError(DataError):
    """A chat template refuses a conversation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One piece of text. Documents with the same `key` are all held out, or all trained on."""

    key: str
    text: str
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) of each message, if the text is a conversation."""


def read_documents(data: Path | None, tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Distinct documents of the file `data`, or of the package chatterbot-corpus if `data` is None.

    Duplicates are removed: the corpus repeats ten of its items about a hundred times each, and a held-out loss over
    text that was trained on too would measure memorization.
    """
    documents = _read_chatterbot(tokenizer) if data is None else read_jsonl(data, tokenizer)
    return list(dict.fromkeys(documents))


def split_documents(
    documents: Sequence[Document], *, held_out_fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """(training documents, held-out documents), both shuffled, the same on every rank for the same `seed`.

    Keys are held out as a whole, so that no held-out question is trained on with another answer.
    """
    keys = sorted({document.key for document in documents})
    if len(keys) < 2:
        raise DataError(
            f"data must have at least 2 distinct documents, one to train on and one to hold out, but has {len(keys)}. "
            "Pass a file with more lines, or lines that differ."
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

    The last, short row is left out. A document may continue in the next row, and attention crosses the border between
    two documents: both are usual for packing without padding. `name` is used in the error only.
    """
    return pack_labelled(documents, tokenizer, seq_len=seq_len, name=name, mask_prompt=False)[:, 0]


def pack_labelled(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, seq_len: int, name: str, mask_prompt: bool
) -> torch.Tensor:
    """`pack` with labels: int64 [num_sequences, 2, seq_len], tokens and labels.

    With `mask_prompt`, only the assistant's answers in conversations have labels. A text has all of its own.
    """
    tokens: list[int] = []
    labels: list[int] = []
    for document in documents:
        # The rendered text already holds its special tokens, so the tokenizer must not add a second set.
        found = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=mask_prompt)
        tokens += found["input_ids"]
        labels += _masked(found, _answers(document, tokenizer)) if mask_prompt else found["input_ids"]
    num_sequences = len(tokens) // seq_len
    if num_sequences == 0:
        raise DataError(
            f"data: the {name} part must have at least {seq_len} tokens, one sequence, but has {len(tokens)}. Pass "
            "more text or a smaller --seq-len."
        )
    both = torch.tensor([tokens, labels], dtype=torch.int64)[:, : num_sequences * seq_len]
    if (both[1] == IGNORED_LABEL).all():
        raise DataError(
            f"--mask-prompt: the {name} part has no answer of an assistant in its full rows, and only answers would be "
            "trained on. Add answers to --data, pass a smaller --seq-len, or leave --mask-prompt out."
        )
    return both.view(2, num_sequences, seq_len).transpose(0, 1)


def _answers(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, int]]:
    """Return where the assistant's answers begin and end in the text, their end tokens included."""
    if not document.messages:
        return [(0, len(document.text))]
    messages = [{"role": role, "content": content} for role, content in document.messages]
    answers = []
    for index in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
        before = _render(messages[:index], tokenizer, add_generation_prompt=True)
        until = _render(messages[: index + 1], tokenizer)
        if not (document.text.startswith(until) and until.startswith(before)):
            raise DataError(
                "--mask-prompt: this tokenizer's chat template renders a message differently by what follows it, so "
                "the answers are not found. Leave --mask-prompt out."
            )
        answers.append((len(before), len(until)))
    return answers


def _masked(found: Any, answers: Sequence[tuple[int, int]]) -> list[int]:
    """Return the tokens, with IGNORED_LABEL for those outside of the answers."""
    pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
    return [token if any(a <= at < b for a, b in answers) else IGNORED_LABEL for token, (at, _) in pairs]


def training_batches(
    sequences: torch.Tensor,
    *,
    micro_batch_size: int,
    indices: range,
    world_size: int,
    seed: int,
    start: int = 0,
) -> Iterator[torch.Tensor]:
    """Endless micro-batches of this rank: int64 [micro_batch_size, seq_len]. Rows are reshuffled after each epoch.

    All ranks use the same endless order of rows. Each optimizer step takes the next rows for all of its micro-batches,
    beginning with row `start`, and micro-batch i gets the i-th part of them. `indices` are those of this rank:
    `zeroamp.micro_batch_indices`. So a step with the same number of rows has the same micro-batches on any number of
    ranks.
    """
    for _, own in _dealt(len(sequences), micro_batch_size, indices, world_size, seed, start):
        yield torch.stack([sequences[row] for row in own])


def labelled_batches(
    sequences: torch.Tensor,
    *,
    micro_batch_size: int,
    indices: range,
    world_size: int,
    seed: int,
    start: int = 0,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """`training_batches` of rows of `pack_labelled`: tokens, labels, and the predicted tokens of a mean micro-batch.

    A loss that is a sum over tokens, divided by the last number, becomes the mean over the tokens of the optimizer
    step: on every rank and micro-batch a token has the same weight.
    """
    num_predicted = (sequences[:, 1, 1:] != IGNORED_LABEL).sum(1)
    for rows, own in _dealt(len(sequences), micro_batch_size, indices, world_size, seed, start):
        tokens, labels = sequences[own].unbind(1)
        yield tokens, labels, max(1.0, num_predicted[rows].sum().item() * micro_batch_size / len(rows))


def _dealt(
    num_sequences: int, micro_batch_size: int, indices: range, world_size: int, seed: int, start: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield, for each micro-batch of this rank, all rows of the optimizer step, and those of the micro-batch."""
    if num_sequences < world_size:
        raise DataError(
            f"data must have at least one training sequence per rank, but has {num_sequences} for {world_size} ranks. "
            "Pass more text, a smaller --seq-len, or use fewer ranks."
        )
    order = itertools.islice(_endless_order(num_sequences, seed), start, None)
    num_rows = world_size * len(indices) * micro_batch_size
    while True:
        rows = list(itertools.islice(order, num_rows))
        for index in indices:
            yield rows, rows[index * micro_batch_size : (index + 1) * micro_batch_size]


def _endless_order(num_rows: int, seed: int) -> Iterator[int]:
    """Yield the indices of all rows in a random order, again and again, each time in a new order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(num_rows, generator=generator).tolist()


def evaluation_batches(
    sequences: torch.Tensor, *, micro_batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of rows of `pack_labelled` as (input_ids, labels), both int64 [micro_batch_size, seq_len].

    Every rank gets the same number of batches, because each forward runs collectives. Rows that fill up the last ones
    have only ignored labels, so the measured set does not depend on the number of ranks.
    """
    num_filler = -len(sequences) % (micro_batch_size * world_size)
    input_ids, labels = torch.cat([sequences, sequences[:1].expand(num_filler, -1, -1)]).unbind(1)
    labels = labels.clone()
    labels[len(sequences) :] = IGNORED_LABEL
    own_ids, own_labels = input_ids[rank::world_size], labels[rank::world_size]
    yield from zip(own_ids.split(micro_batch_size), own_labels.split(micro_batch_size), strict=True)


def read_jsonl(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Documents of a JSON-lines file: each line has "text", or "question" and "answer", or "messages".

    Raises DataError for a line in another form; the error names the line.
    """
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "no such file"
        raise DataError(f"--data {path}: {found}. Pass a JSON-lines file, or leave --data out for the corpus.")
    documents = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    documents.append(_jsonl_document(line.decode(), where, tokenizer))
                except UnicodeDecodeError as error:
                    raise DataError(f"{where}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from error
                except _TemplateError as error:
                    raise DataError(f"{where}: {error}") from error
    return documents


def _jsonl_document(line: str, where: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg}). Write one JSON object per line.") from error
    match record:
        case {"text": str(text)} if text:
            return Document(key=text, text=text + (tokenizer.eos_token or ""))
        case {"question": str(question), "answer": str(answer)} if question and answer:
            return _conversation([question, answer], tokenizer)
        case {"messages": [{"role": str(), "content": str()}, *_] as messages} if all(map(_is_message, messages)):
            asked = [message["content"] for message in messages if message["role"] == "user"]
            return _document([*asked, messages[0]["content"]][0], messages, tokenizer)
    found = f"keys {sorted(record)}" if isinstance(record, dict) else f"a JSON {type(record).__name__}"
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        wrong = next((each for each in record["messages"] if not _is_message(each)), None)
        found = "no message" if wrong is None else f"among its messages {json.dumps(wrong)}"
    raise DataError(
        f'{where} must be {{"text": "…"}} or {{"question": "…", "answer": "…"}} with non-empty strings, or '
        f'{{"messages": [{{"role": "user", "content": "…"}}, …]}} with the roles {", ".join(ROLES)}, but has {found}. '
        "Correct or remove the line."
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)


def _read_chatterbot(tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    # find_spec finds the package's folder without running the package, whose imports are not needed here.
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "data: the package chatterbot-corpus, which contains the default text, is not installed. Run "
            "`pip install chatterbot-corpus`, or pass your own text with --data file.jsonl."
        )
    documents = []
    for path in sorted(Path(spec.submodule_search_locations[0], "data", "english").glob("*.yml")):
        for turns in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            # Turns alternate between question and answer. A last question without an answer is left out.
            turns = turns[: len(turns) // 2 * 2]
            documents.append(_conversation(turns, tokenizer))
    return documents


def _conversation(turns: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Document:
    """The turns question, answer, question, answer, … as one document; its key is the first question."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return _document(turns[0], messages, tokenizer)


def _document(question: str, messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> Document:
    """Conversations with the same first question are held out, or trained on, together."""
    pairs = tuple((message["role"], message["content"]) for message in messages)
    return Document(key=question.strip().casefold(), text=_render(messages, tokenizer), messages=pairs)


def _render(messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, **options: bool) -> str:
    if tokenizer.chat_template is None:
        raise DataError(
            "data: questions and answers need a tokenizer with a chat template, but this model's tokenizer has none. "
            'Pass a chat model with --model, or lines with "text" in --data.'
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (TemplateError, ValueError) as error:  # a ValueError: no message
        raise _TemplateError(
            f"the tokenizer's chat template refuses a conversation ({error}). Change its roles and their order, or the "
            "template. Questions with answers begin with a system message; --mask-prompt renders their beginnings."
        ) from error
