"""What rounding costs in training: loss curves and gradient errors of one LLaMA by dtypes, sums and number of ranks.

    python -m benchmarks.loss_curves --out FOLDER [--model 3.7m] [--ranks 8 1024] [--only zeroamp] [--seeds 0 1 2]
    python -m benchmarks.loss_curves --out FOLDER --errors
    python -m benchmarks.loss_curves --out FOLDER --check

One process plays all ranks (`benchmarks/virtual_ranks.py`): 8 to 1,024 ranks share the same batch. It is plain torch,
except for the sum of the method "zeroamp", which `--check` compares with eight processes. Each curve is a file in
FOLDER, and a curve whose file exists does not run again, so several processes may share the work. With glibc it takes
half the time if MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=100000000000: memory is used again instead of returned.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from benchmarks import shared_runs, virtual_ranks
from benchmarks.virtual_ranks import Gradients, Sum, logits
from examples._data import pack, read_documents, split_documents
from examples._weights import load_model

RANKS = (8, 64, 256, 1024)
EVERY = 5
"""Optimizer steps between two validation losses."""
CHECKED_STEPS = 3
"""Of `--check`."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Numerics of training."""

    add: Sum
    params: torch.dtype = torch.float32
    """Dtype in which the forward sees the weights. fp32: under autocast."""
    masters: torch.dtype = torch.float32
    """Dtype of the weights that AdamW updates, and of its states."""


METHODS = {
    "zeroamp": Method(add=virtual_ranks.zeroamp_sum),
    "autocast, fp32 sum": Method(add=virtual_ranks.fp32_ring),
    "autocast, bf16 ring": Method(add=virtual_ranks.bf16_ring),
    "autocast, bf16 tree": Method(add=virtual_ranks.bf16_tree),
    "MixedPrecisionPolicy(bf16, fp32)": Method(add=virtual_ranks.fp32_ring, params=torch.bfloat16),
    "all bf16": Method(add=virtual_ranks.bf16_ring, params=torch.bfloat16),
    "bf16 masters": Method(add=virtual_ranks.bf16_ring, params=torch.bfloat16, masters=torch.bfloat16),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, its data and its schedule, the same for all methods and numbers of ranks."""

    load: Callable[[int], LlamaForCausalLM]
    """Seed -> model with fp32 weights."""
    rows: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    """Length -> tokens for training and for validation, int64 [rows, length + 1]."""
    samples: int
    """Of a batch, of all ranks."""
    length: int
    error_length: int
    """Tokens of each of the 1,024 samples for which gradient errors are measured."""
    steps: int
    lr: float


@cache
def _source_rows(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of torch's Python sources, every tenth file for validation, in a BPE of 1,024 tokens."""
    texts = [path.read_text() for path in sorted(Path(torch.__file__).parent.glob("[dno]*/**/*.py"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    encoded = [torch.tensor(each.ids, dtype=torch.int64) for each in tokenizer.encode_batch(texts)]
    train = torch.cat([ids for index, ids in enumerate(encoded) if index % 10])
    return _cut(train, length), _cut(torch.cat(encoded[::10]), length)


def _cut(tokens: torch.Tensor, length: int) -> torch.Tensor:
    return tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)


@cache
def _smollm2_rows(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the demo's text."""
    _, tokenizer = load_model("smollm2", seed=0)
    train, held_out = split_documents(read_documents(None, tokenizer), held_out_fraction=0.1, seed=0)
    return (
        pack(train, tokenizer, seq_len=length + 1, name="train"),
        pack(held_out, tokenizer, seq_len=length + 1, name="held out"),
    )


def _llama(seed: int) -> LlamaForCausalLM:
    """Return the model of 3,688,704 parameters of `benchmarks/peers/model.py`, as transformers has it."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "initializer_range": 0.05,
    }
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)
    return LlamaForCausalLM._from_config(config, attn_implementation="eager")


def _smollm2(seed: int) -> LlamaForCausalLM:
    model = load_model("smollm2", seed=seed)[0]
    model.set_attn_implementation("eager")  # faster on a CPU for sequences as short as these
    return model


SETTINGS = {
    "3.7m": Setting(
        load=_llama, rows=_source_rows, samples=1024, length=16, error_length=16, steps=50, lr=3e-3
    ),
    "smollm2": Setting(
        load=_smollm2, rows=_smollm2_rows, samples=64, length=16, error_length=8, steps=20, lr=1e-4
    ),
}  # fmt: skip


def batches(rows: torch.Tensor, samples: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels, int64 [samples, length], of rows in an order of the seed, again and again."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < samples:
            order = torch.cat([order, torch.randperm(len(rows), generator=generator)])
        mine, order = rows[order[:samples]], order[samples:]
        yield mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def learning_rate(setting: Setting, step: int) -> float:
    """Return the rate of a step: a tenth of the steps warm up, then a cosine falls to a tenth."""
    warm_up = max(1, setting.steps // 10)
    after = (step - warm_up) / max(1, setting.steps - warm_up)
    return setting.lr * ((step + 1) / warm_up if step < warm_up else 0.55 + 0.45 * math.cos(math.pi * after))


def cast(model: LlamaForCausalLM, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a copy whose parameters, but no buffers, have a dtype, as `MixedPrecisionPolicy` has it."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    return copied


def optimizer_of(model: torch.nn.Module, setting: Setting) -> torch.optim.AdamW:
    """Return AdamW over the parameters."""
    return torch.optim.AdamW(model.parameters(), lr=setting.lr, betas=(0.9, 0.95), weight_decay=0.1)


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Return the mean loss of at most 8,192 tokens that no step trains on, in the numerics of training."""
    mine = rows[: 8192 // (rows.shape[1] - 1)]
    total = sum(
        functional.cross_entropy(logits(model, part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        for part in mine.split(128)
    )
    return float(total) / mine[:, 1:].numel()


def train(setting: Setting, method: Method, num_ranks: int, seed: int) -> tuple[LlamaForCausalLM, dict[str, object]]:
    """Train once. Return the master weights, and the losses of training and, step -> loss, of validation."""
    train_rows, held_out = setting.rows(setting.length)
    masters = setting.load(seed)
    if method.masters != torch.float32:
        masters = cast(masters, method.masters)
    model = masters if method.params == method.masters else cast(masters, method.params)
    optimizer = optimizer_of(masters, setting)
    losses, validation = [], {"0": validation_loss(model, held_out)}
    stream = batches(train_rows, setting.samples, seed)
    for step in range(setting.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(setting, step)
        gradients = Gradients(model, *next(stream), num_ranks)
        means = gradients.mean(method.add)
        for name, parameter in masters.named_parameters():
            parameter.grad = means[name].to(method.masters)
        optimizer.step()
        for one, other in zip(model.parameters(), masters.parameters(), strict=True):
            if one is not other:
                one.data.copy_(other.data)
        losses.append(gradients.loss)
        if (step + 1) % EVERY == 0:
            validation[str(step + 1)] = validation_loss(model, held_out)
    return masters, {"training": losses, "validation": validation}


def run_curves(options: argparse.Namespace) -> None:
    """Train all curves that have no file yet."""
    for seed in options.seeds:
        for num_ranks in options.ranks:
            for name in options.only or METHODS:
                run = {"model": options.model, "method": name, "ranks": num_ranks, "seed": seed}
                path = shared_runs.claim(options.out / "curves", run)
                if path is None:
                    continue
                began, cpu_began = time.monotonic(), time.process_time()
                masters, found = train(SETTINGS[options.model], METHODS[name], num_ranks, seed)
                found["seconds"] = round(time.monotonic() - began)
                found["CPU seconds"] = round(time.process_time() - cpu_began)
                if name == "autocast, fp32 sum" and num_ranks == min(RANKS):
                    torch.save(masters.state_dict(), options.out / f"{options.model}-{seed}.pt")
                shared_runs.write(path, run, found)
                print(path.stem, found["validation"], found["seconds"], flush=True)


def run_errors(options: argparse.Namespace) -> None:
    """Measure the errors of gradients at the trained weights of each seed."""
    setting = SETTINGS[options.model]
    virtual_ranks.TOKENS = 2**9  # less memory beside the inputs and gradients of all layers, which are retained
    for seed in options.seeds:
        masters = setting.load(seed)
        masters.load_state_dict(torch.load(options.out / f"{options.model}-{seed}.pt"))
        stream = batches(setting.rows(setting.error_length)[0], max(RANKS), seed=1000 + seed)
        batch, other = next(stream), next(stream)
        exact = fp32_gradient(masters, *batch)
        noise = distance(fp32_gradient(masters, *other), exact)
        for num_ranks in options.ranks:
            run = {"model": options.model, "ranks": num_ranks, "seed": seed}
            path = shared_runs.claim(options.out / "errors", run)
            if path is None:
                continue
            sums = {name: method.add for name, method in METHODS.items() if method.params == torch.float32}
            means = Gradients(masters, *batch, num_ranks).mean({**sums, "exact": virtual_ranks.exact_sum})
            of_sum = {name: distance(means[name], means["exact"]) for name in sums}
            of_all = {name: distance(means[name], exact) for name in means}
            del means
            low = {name: method.add for name, method in METHODS.items() if method.params != torch.float32}
            low.pop("bf16 masters")  # its gradient is that of "all bf16"
            means = Gradients(cast(masters, torch.bfloat16), *batch, num_ranks).mean(
                {**low, "bf16 parameters, exact": virtual_ranks.exact_sum}
            )
            of_sum |= {name: distance(means[name], means["bf16 parameters, exact"]) for name in low}
            of_all |= {name: distance(means[name], exact) for name in means}
            del means
            shared_runs.write(path, run, {"of the sum": of_sum, "of all": of_all, "noise": noise})
            print(path.stem, {name: each["all"] for name, each in of_sum.items()}, flush=True)


def fp32_gradient(model: LlamaForCausalLM, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return name -> gradient of the mean loss, computed without autocast."""
    model.zero_grad()
    for mine in torch.arange(len(tokens)).split(64):
        found = model(tokens[mine], use_cache=False).logits
        loss = functional.cross_entropy(found.flatten(0, 1), labels[mine].flatten(), reduction="sum")
        (loss / labels.numel()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients  # type: ignore[return-value]


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return layer -> |found - exact| / |exact|, and "all"."""
    squares: dict[str, list[float]] = {}
    for name, right in exact.items():
        layer = ".".join(name.removeprefix("model.").split(".")[: 2 if "layers" in name else 1])
        pair = float((found[name].double() - right).square().sum()), float(right.double().square().sum())
        for key in (layer, "all"):
            old = squares.get(key, [0.0, 0.0])
            squares[key] = [old[0] + pair[0], old[1] + pair[1]]
    return {key: math.sqrt(above / below) for key, (above, below) in squares.items()}


def check(options: argparse.Namespace) -> None:
    """Compare the weights after some steps with those of zeroamp on eight gloo ranks, bit by bit."""
    from tests.processes import ranks as rank_processes

    rank_processes.CALL_TIMEOUT_S = 1800
    setting = replace(SETTINGS[options.model], steps=CHECKED_STEPS)
    ranks = rank_processes.Ranks(8)
    try:
        real = ranks.run(train_on_ranks, options.model)[0]
    finally:
        ranks.stop()
    virtual_ranks.TOKENS = setting.samples * setting.length // 8  # a product of other size may have other last bits
    masters, _ = train(setting, METHODS["zeroamp"], 8, seed=0)
    differ = [name for name, parameter in masters.named_parameters() if not torch.equal(parameter, real[name])]
    found = f"{options.model}: after {CHECKED_STEPS} steps {len(differ)} of {len(real)} parameters differ"
    print(found, differ)
    (options.out / f"check-{options.model}.txt").write_text(found + "\n")


def train_on_ranks(name: str) -> dict[str, torch.Tensor]:
    """Train with zeroamp at ZeRO-3 on this rank's part of the batches. Return the whole weights."""
    import zeroamp

    setting = replace(SETTINGS[name], steps=CHECKED_STEPS)
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}
    model = zeroamp.wrap_model(setting.load(0), zeroamp.policy_from_config(config))
    optimizer = optimizer_of(model, setting)
    stream = batches(setting.rows(setting.length)[0], setting.samples, seed=0)
    for step in range(setting.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(setting, step)
        tokens, labels = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in next(stream))
        found = model(tokens, use_cache=False).logits.float()
        functional.cross_entropy(found.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in whole.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--model", choices=SETTINGS, default="3.7m")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--only", choices=METHODS, nargs="+", help="methods; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--errors", dest="run", action="store_const", const=run_errors, default=run_curves)
    parser.add_argument("--check", dest="run", action="store_const", const=check)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.run(options)


if __name__ == "__main__":
    main()
