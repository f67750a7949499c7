"""Evaluation of the fine-tuning example: the held-out loss, and the answer to a question."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _data import IGNORED_LABEL, DataError, Document, evaluation_batches
from transformers import PreTrainedTokenizerBase

MAX_ANSWER_TOKENS = 24


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, rows: torch.Tensor, micro_batch_size: int, device: torch.device) -> float:
    """Mean loss per predicted token over all `rows` and all ranks, in nats; the same number on every rank."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, number of predicted tokens
    for input_ids, labels in evaluation_batches(
        rows, micro_batch_size=micro_batch_size, rank=dist.get_rank(), world_size=dist.get_world_size()
    ):
        input_ids, labels = input_ids.to(device), labels.to(device)
        # transformers divides the summed loss by num_items_in_batch. Its default, a mean per batch, would weigh tokens
        # by their batch.
        totals[0] += model(input_ids=input_ids, labels=labels, num_items_in_batch=1, use_cache=False).loss
        totals[1] += (labels[:, 1:] != IGNORED_LABEL).sum()
    dist.all_reduce(totals)
    if totals[1] == 0:
        raise DataError("no held-out token is part of an answer. Pass more text, or a larger --seq-len.")
    model.train()
    return (totals[0] / totals[1]).item()


@torch.no_grad()
def answer(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    question: str | None,
    example: Document,
    device: torch.device,
) -> list[str]:
    """The model's most likely answer, as a list of one; [] without a question. All ranks generate the same tokens.

    The question is asked as in `example`, a document of the data: after its system message, or as plain text.
    """
    if question is None:
        return []
    if example.messages:
        turns = [*(each for each in example.messages[:1] if each[0] == "system"), ("user", question)]
        messages = [{"role": role, "content": content} for role, content in turns]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        prompt = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
    prompt = prompt.to(device)
    model.eval()
    tokens = model.generate(
        **prompt, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id
    )
    model.train()
    new = tokens[0, prompt["input_ids"].shape[1] :]
    is_cut = len(new) == MAX_ANSWER_TOKENS and new[-1] != tokenizer.eos_token_id
    return [tokenizer.decode(new, skip_special_tokens=True).strip() + " …" * is_cut]
