"""Training runs of transformers' `Trainer` on ranks: the stock one under DDP, and those with `ZeroampMixin`."""

import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

DDP = "the library's own, under DDP"
REDUCES_EACH = "the library's own, with the gradients of each micro-batch averaged over ranks, then added"
VOCAB, LENGTH = 64, 8


def forget_accelerate():
    """Forget accelerate's states of the process, which all Accelerators share."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def fresh():
    """Forget accelerate's states of the process, and let its warnings pass."""
    forget_accelerate()
    warnings.simplefilter("ignore")


def examples(number, seed=0):
    """Token sequences; the labels of some are masked, so that batches have different numbers of them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(number):
        tokens = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[: index % 5] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def llama(seed=0, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "pad_token_id": 0, **changes}))


def arguments(kind, folder, cfg=None, *, cls=None, **changes):
    """Arguments of a Trainer: `ZeroampTrainingArguments` where `kind` is a stage. cls: of those of a stock one."""
    from transformers import TrainingArguments

    from zeroamp.integrations.transformers import ZeroampTrainingArguments

    fresh()
    given: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": 2, "max_grad_norm": 0.0,
        "learning_rate": 1e-2, "bf16": True, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "num_train_epochs": 1, "per_device_eval_batch_size": 2, **changes,
    }  # fmt: skip
    if kind in (DDP, REDUCES_EACH):
        return (cls or TrainingArguments)(**given)
    return ZeroampTrainingArguments(zeroamp={"zero_optimization": {"stage": kind}, **(cfg or {})}, **given)


def trainer_of(kind, folder, cfg=None, *, model=None, num=40, args=None, trainer_arguments=None, **changes):
    """Return a Trainer that has not trained. args: its arguments, in place of those that `changes` change."""
    from transformers import PrinterCallback, Trainer

    from zeroamp.integrations.transformers import ZeroampTrainer

    args = arguments(kind, folder, cfg, **changes) if args is None else args
    cls = Trainer if kind in (DDP, REDUCES_EACH) else ZeroampTrainer
    given = {"train_dataset": examples(num), **(trainer_arguments or {})}
    trainer = cls(llama() if model is None else model, args, **given)
    trainer.remove_callback(PrinterCallback)
    if kind == REDUCES_EACH:
        reduce_each(trainer.accelerator)
    return trainer


def reduce_each(accelerator):
    """Make a stock Accelerator average the gradients of each micro-batch over ranks, then add: as ZeRO stages 2 and 3.

    DDP adds micro-batches on each rank, then averages over ranks.
    """
    sums = {}

    def backward(loss):
        (loss / accelerator.gradient_accumulation_steps).backward()
        for parameter in accelerator._models[0].parameters():
            dist.all_reduce(parameter.grad)
            sums[parameter] = sums.get(parameter, 0) + parameter.grad / dist.get_world_size()
            parameter.grad = sums[parameter] if accelerator.sync_gradients else None
        if accelerator.sync_gradients:
            sums.clear()

    accelerator.prepare_model = lambda model, **_: type(accelerator).prepare_model(accelerator, model, None, True)
    accelerator.backward = backward


def parameters_of(model):
    """Return whole copies of the trained parameters."""
    named = ((n.removeprefix("module."), p.detach()) for n, p in model.named_parameters() if p.requires_grad)
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in named}


@dataclasses.dataclass
class Run:
    """What a training logged, and the parameters that it ended with."""

    losses: list
    norms: list
    rates: list
    parameters: dict
    evaluated: dict = dataclasses.field(default_factory=dict)

    def differences(self, other, norms=True):
        """Return what is not equal, bit for bit."""
        found = [name for name in ("losses", "rates", "evaluated") if getattr(self, name) != getattr(other, name)]
        if norms and repr(self.norms) != repr(other.norms):  # nan of a skipped step is equal to nan
            found.append("norms")
        pairs = self.parameters.items()
        return found + [name for name, value in pairs if not torch.equal(value, other.parameters[name])]


def outcome(trainer, evaluated=None):
    """Return what a trainer's training did. evaluated: what its `evaluate` returned, of which times are left out."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    logged = [[entry[key] for entry in steps] for key in ("loss", "grad_norm", "learning_rate")]
    metrics = {name: value for name, value in (evaluated or {}).items() if "loss" in name or "reward" in name}
    return Run(*logged, parameters_of(trainer.model), metrics)


def run(kind, folder, cfg=None, **changes):
    """Train, and return what happened."""
    trainer = trainer_of(kind, folder, cfg, **changes)
    trainer.train()
    return outcome(trainer)
