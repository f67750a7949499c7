"""What every rank runs in the tests of TRL: a stock trainer or one on zeroamp, on a tiny Llama and random tokens."""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from tests.models.adapters import quietly
from tests.processes.trainer import forget_accelerate, outcome
from tests.processes.trainer import llama as tiny_llama

STOCK = "stock"
"""In the place of a stage: the library's own trainer, under DDP."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer and its model, the same on every rank."""

    trainer: str = "SFTTrainer"
    dtype: str = "float32"
    """Of the base model."""
    lora: dict | None = None
    """Arguments of `LoraConfig`; None trains the whole model."""
    model: dict = field(default_factory=dict)
    """More arguments of `LlamaConfig`."""
    is_text: bool = False
    """Whether the examples are text, which the trainer tokenizes."""
    arguments: dict = field(default_factory=dict)
    """More of the trainer's."""
    zeroamp: dict = field(default_factory=dict)
    """More keys of the config."""
    reference: str | None = None
    """The dtype of DPO's reference model; None lets the trainer find it."""


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


def llama(case, dtype=None):
    shape = {"vocab_size": 258, "intermediate_size": 48, "pad_token_id": None}
    return tiny_llama(1, **(shape | case.model)).to(getattr(torch, dtype or case.dtype))


def rewarding(case):
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(1)
    config = llama(case).config
    config.num_labels, config.pad_token_id = 1, 257
    return LlamaForSequenceClassification(config)


def words(generator, low, high):
    return "".join(generator.choice("abcdefgh ") for _ in range(generator.randint(low, high)))


def examples(case, folder=None):
    """The data set, the same on every rank. In a folder: TRL looks there for what rank 0 computed."""
    from datasets import Dataset

    draw = random.Random(3)
    if case.trainer in ("GRPOTrainer", "RLOOTrainer"):
        rows = [{"prompt": words(draw, 3, 12)} for _ in range(16)]
    elif case.trainer in ("DPOTrainer", "RewardTrainer"):
        rows = [{name: words(draw, 3, 12) for name in ("prompt", "chosen", "rejected")} for _ in range(16)]
    elif case.trainer == "KTOTrainer":
        rows = [{"prompt": words(draw, 3, 12), "completion": words(draw, 3, 12), "label": i % 2 == 0}
                for i in range(16)]  # fmt: skip
    elif case.is_text:
        rows = [{"prompt": words(draw, 3, 8), "completion": words(draw, 3, 20)} for _ in range(16)]
    else:
        lists = [[draw.randrange(256) for _ in range(draw.randint(6, 20))] for _ in range(16)]
        rows = [{"input_ids": tokens, "labels": tokens} for tokens in lists]
    data = Dataset.from_list(rows)
    if folder is None:
        return data
    if dist.get_rank() == 0:
        data.save_to_disk(folder)
    dist.barrier()
    return Dataset.load_from_disk(folder)


def classes(case, stage):
    """The trainer's class and that of its arguments."""
    import trl

    from zeroamp.integrations.trl import ZeroampMixin

    plain, arguments = getattr(trl, case.trainer), getattr(trl, case.trainer.replace("Trainer", "Config"))
    return plain if stage == STOCK else type("Mine", (ZeroampMixin, plain), {}), arguments


def build(case, stage, folder, model=None, reward=None, **more):
    """The trainer, of `model` or the case's. reward: the function by which a trainer that generates is trained."""
    import peft

    forget_accelerate()
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    cls, arguments_cls = classes(case, stage)
    arguments = {
        "use_cpu": True, "bf16": True, "per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "max_grad_norm": 0.0, "disable_tqdm": True,
        "dataloader_pin_memory": False, **({"max_length": 32} if reward is None else {}), **case.arguments, **more,
    }  # fmt: skip
    args = arguments_cls(output_dir=str(folder), **arguments)
    given = {} if stage == STOCK else {"zeroamp": {"zero_optimization": {"stage": stage}} | case.zeroamp}
    if case.lora is not None:
        given["peft_config"] = peft.LoraConfig(task_type="CAUSAL_LM", **case.lora)
    if reward is not None:
        given["reward_funcs"] = reward
    if case.reference is not None:
        given["ref_model"] = llama(case, case.reference)
    data = examples(case, str(Path(folder) / "data") if arguments.get("precompute_ref_log_probs") else None)
    if model is None:
        model = rewarding(case) if case.trainer == "RewardTrainer" else llama(case)
    return cls(model, args=args, train_dataset=data, eval_dataset=data.select(range(6)),
               processing_class=tokenizer(), **given)  # fmt: skip


@quietly
def trained(case, stage, folder, *, is_evaluated=False, resume=None, **more):
    """Train, and return the outcome."""
    silence()
    trainer = build(case, stage, folder, **more)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer, trainer.evaluate() if is_evaluated else None)


@quietly
def differences(case, stages, folder, **more):
    """What differs from the stock trainer, by stage."""
    stock = trained(case, STOCK, Path(folder) / "stock", **more)
    assert len(set(stock.losses)) > 1
    return {
        stage: trained(case, stage, Path(folder) / str(stage), **more).differences(stock, norms=False)
        for stage in stages
    }


def silence():
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    os.environ["TQDM_DISABLE"] = "1"
    assert dist.is_initialized()
