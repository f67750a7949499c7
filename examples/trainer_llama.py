"""transformers' Trainer on zeroamp: torchrun --nproc-per-node 2 examples/trainer_llama.py --zeroamp config.json

Without --model it trains a tiny random LLaMA, on any machine. With --model FOLDER of safetensors, each rank reads its
own part of the weights. All arguments of `TrainingArguments` work, such as --num_train_epochs, --bf16,
--gradient_accumulation_steps or --resume_from_checkpoint.
"""

from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, LlamaConfig, LlamaForCausalLM, set_seed

import zeroamp
from zeroamp.integrations.transformers import ZeroampTrainer, ZeroampTrainingArguments

CONFIG = {  # for a run without --zeroamp; "auto" values come from the arguments
    "zero_optimization": {"stage": 3},
    "torch_autocast": {"enabled": "auto", "dtype": "auto"},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
VOCABULARY, LENGTH = 256, 32


@dataclass
class ModelArguments:
    """The model and its training text."""

    model: str = field(default="tiny", metadata={"help": "tiny, or a folder of safetensors."})
    text: str = field(default="", metadata={"help": "A text file, read as bytes; a counting sequence without it."})


class Pieces(torch.utils.data.Dataset):
    """Pieces of LENGTH bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = torch.tensor(list(self.data[index * LENGTH : (index + 1) * LENGTH]))
        return {"input_ids": piece, "labels": piece.clone()}


def read(path: str) -> bytes:
    """Return the bytes of a file, or without a path a sequence that is easy to learn."""
    if not path:
        return bytes(index % 64 for index in range(128 * LENGTH))
    with open(path, "rb") as file:
        return file.read()


def build(name: str) -> torch.nn.Module:
    """Return the model: a tiny one, or one on the meta device."""
    if name != "tiny":
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))


def main() -> None:
    """Train, evaluate, and save the model for from_pretrained."""
    parser = HfArgumentParser((ModelArguments, ZeroampTrainingArguments))
    parser.set_defaults(use_cpu=not torch.accelerator.is_available())  # transformers counts CPU ranks only with it
    own, args = parser.parse_args_into_dataclasses()
    if args.zeroamp is None:
        args.zeroamp = CONFIG
    set_seed(args.seed)  # the same weights on every rank
    pieces = Pieces(read(own.text))
    trainer = ZeroampTrainer(build(own.model), args, train_dataset=pieces, eval_dataset=pieces)
    if own.model != "tiny":
        trainer.wrap()
        zeroamp.load_hf(trainer.model, own.model)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_model()  # on all ranks


if __name__ == "__main__":
    main()
