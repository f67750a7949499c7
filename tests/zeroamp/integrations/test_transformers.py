"""`ZeroampTrainer` beside transformers' own `Trainer` under DDP, on 2 gloo ranks: the same bits."""

import math
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.processes.trainer import (
    DDP,
    REDUCES_EACH,
    VOCAB,
    arguments,
    examples,
    llama,
    outcome,
    parameters_of,
    run,
    trainer_of,
)
from tests.selection import slow_but

pytest.importorskip("transformers", reason="its Trainer is what ZeroampTrainer is compared with")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

ULP = 2.0**-23  # of fp32, relative


def _ten_steps(folder, stages):
    stock = run(DDP, folder)
    found = {stage: run(stage, folder) for stage in stages}
    norms = max(abs(a / b - 1) for each in found.values() for a, b in zip(each.norms, stock.norms, strict=True))
    return {stage: each.differences(stock, norms=False) for stage, each in found.items()}, norms, stock.losses


def test_ten_steps_are_those_of_the_stock_trainer(ranks2, tmp_path):
    for found, norms, losses in ranks2.run(_ten_steps, tmp_path, range(4)):
        assert found == {0: [], 1: [], 2: [], 3: []}
        assert norms <= 2 * ULP  # one sum of squares in fp64, beside torch's norm of norms in fp32
        assert len(set(losses)) == 10


def _accumulated(folder, kind, averages):
    """4 micro-batches an epoch in steps of 3 and 1, with losses divided by the number of labels of the whole step.

    This number differs between ranks and micro-batches.
    """
    changes = {"average_tokens_across_devices": averages, "gradient_accumulation_steps": 3, "num_train_epochs": 2}
    changes["num"] = 16
    if kind == "function":
        changes["trainer_arguments"] = {"train_dataset": examples(16), "compute_loss_func": _summed_loss}
    elif kind == "smoothed":
        changes["label_smoothing_factor"] = 0.1
    expected = {1: run(DDP, folder, **changes), 3: run(REDUCES_EACH, folder, **changes)}
    found = {s: run(s, folder, **changes).differences(stock, norms=False) for s, stock in expected.items()}
    return found, len(expected[1].losses)


def _summed_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1]
    assert logits.dtype == torch.float32  # as accelerate returns them
    return (
        nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch
    )


@pytest.mark.parametrize(
    "case", slow_but([("model", True), ("function", False), ("smoothed", True)], ("model", True)), ids=str
)
def test_accumulation_with_a_short_last_step_and_losses_normalised_by_tokens(ranks2, tmp_path, case):
    assert ranks2.run(_accumulated, tmp_path, *case) == [({1: [], 3: []}, 4)] * 2


def _callback_order(folder):
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self):
            self.seen = []

        def note(self, event, model):
            gradients = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
            squares = sum(gradient.double().square().sum().item() for gradient in gradients)
            weights = torch.stack([value.double().sum() for value in parameters_of(model).values()]).sum().item()
            self.seen.append((event, math.sqrt(squares), weights))

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.note("before", model)

        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.note("after", model)

    watch = Watch()
    trainer = trainer_of(2, folder, max_grad_norm=0.5, max_steps=2)
    trainer.add_callback(watch)
    trainer.train()
    return watch.seen


def test_callbacks_see_clipped_gradients_before_the_update_and_none_after(ranks2, tmp_path):
    for seen in ranks2.run(_callback_order, tmp_path):
        assert [event for event, *_ in seen] == ["before", "after", "before", "after"]
        (_, first, start), (_, none, later), (_, second, unchanged), _ = seen
        assert first == pytest.approx(0.5, rel=1e-5)  # clipped to it
        assert second == pytest.approx(0.5, rel=1e-5)
        assert none == 0
        assert later == unchanged != start


def _evaluated(folder):
    """The stock Trainer evaluates before its training in another object: after an evaluation it trains without DDP."""
    given = {"train_dataset": examples(12), "eval_dataset": examples(7, 1)}
    found = []
    for kind in (DDP, 3):
        trainer = trainer_of(kind, folder, trainer_arguments=given, eval_strategy="steps", eval_steps=2)
        evaluated = trainer_of(DDP, folder, trainer_arguments=given) if kind == DDP else trainer
        first = evaluated.evaluate()["eval_loss"]
        if kind == DDP:
            trainer = trainer_of(kind, folder, trainer_arguments=given, eval_strategy="steps", eval_steps=2)
        trainer.train()
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        predictions = trainer.predict(examples(5, 2)).predictions
        found.append((first, losses, torch.tensor(predictions), outcome(trainer)))
    (*stock, stock_run), (*ours, our_run) = found
    equal = stock[:2] == ours[:2] and torch.equal(stock[2], ours[2])
    return equal, our_run.differences(stock_run, norms=False), len(ours[1])


def test_evaluation_before_during_and_after_the_training(ranks2, tmp_path):
    for equal, differences, number in ranks2.run(_evaluated, tmp_path):
        assert equal
        assert differences == []
        # One each 2 of 3 steps. The one of evaluate() alone was not logged by the lowest release that is permitted.
        assert number == (1 if version("transformers").startswith("5.3.") else 2)


def _t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8}
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    )


def _generated(folder):
    """Ranks generate sequences of different lengths, then training goes on."""
    from transformers import PrinterCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments

    from zeroamp.integrations.transformers import ZeroampMixin

    changes = {
        "predict_with_generate": True, "generation_max_length": 12 + 4 * dist.get_rank(), "max_steps": 2,
        "per_device_eval_batch_size": 1, "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    given = {
        "train_dataset": examples(12), "eval_dataset": examples(4, 1),
        "compute_metrics": lambda prediction: {"sum": int(prediction.predictions.sum())},
    }  # fmt: skip
    found = []
    for bases, more in (((), {}), ((ZeroampMixin,), {"zeroamp": {"zero_optimization": {"stage": 3}}})):
        args = arguments(DDP, folder, cls=Seq2SeqTrainingArguments, **changes)
        trainer = type("Some", (*bases, Seq2SeqTrainer), {})(_t5(), args, **given, **more)
        trainer.remove_callback(PrinterCallback)
        if bases:
            trainer.evaluate()  # after which the stock Trainer would train without DDP
        trainer.train()
        sums = [entry["eval_sum"] for entry in trainer.state.log_history if "eval_sum" in entry]
        found.append((sums, outcome(trainer)))
    (stock, stock_run), (ours, our_run) = found
    return stock, ours, our_run.differences(stock_run, norms=False)


@pytest.mark.slow
def test_generation_of_different_lengths_on_the_ranks(ranks2, tmp_path):
    for stock, ours, differences in ranks2.run(_generated, tmp_path):
        assert ours == stock
        assert differences == []


def _changed(folder, changes):
    return run(3, folder, **changes).differences(run(DDP, folder), norms=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"gradient_checkpointing": True}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}],
    ids=["activation checkpointing", "compiled units"],
)
def test_arguments_that_keep_the_bits(ranks2, tmp_path, changes):
    assert ranks2.run(_changed, tmp_path, changes) == [[], []]


def _own_optimizer(folder):
    """An optimizer that was built before the Trainer, on parameters that the wrap replaces."""
    found = []
    for kind in (DDP, 3):
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        given = {"train_dataset": examples(12), "eval_dataset": examples(4), "optimizers": (optimizer, scheduler)}
        trainer = trainer_of(kind, folder, model=model, trainer_arguments=given)
        if kind != DDP:  # after which the stock Trainer would train without DDP
            trainer.evaluate()
        trainer.train()
        found.append(outcome(trainer))
    return found[1].differences(found[0], norms=False)


def test_an_optimizer_that_was_built_before_the_trainer_trains_after_an_evaluation(ranks2, tmp_path):
    assert ranks2.run(_own_optimizer, tmp_path) == [[], []]


def _of_8_bits(folder):
    """Shards of 4,096 elements and more, in whole blocks: the state is quantized as that of whole parameters."""
    from bitsandbytes.optim import GlobalOptimManager

    found = []
    for kind in (DDP, 3):
        model = llama(hidden_size=128, intermediate_size=128)
        trainer = trainer_of(kind, folder, model=model, num=12, optim="adamw_bnb_8bit")
        trainer.train()
        found.append(outcome(trainer))
    GlobalOptimManager.get_instance().initialize()  # the Trainer's overrides would hold for later optimizers
    states = trainer.optimizer.optimizer.state.values()
    return found[1].differences(found[0], norms=False), {state["state1"].dtype for state in states}


def test_an_optimizer_of_bitsandbytes(ranks2, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: its AdamW8bit is tested")
    for found, dtypes in ranks2.run(_of_8_bits, tmp_path):
        assert found == []
        assert dtypes == {torch.uint8, torch.float32}  # float32: norms, and embeddings, as the Trainer asks for


def _from_meta(folder):
    """Large models of docs/transformers.md: the model is built on the meta device, and filled when it is wrapped."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    trainer = trainer_of(3, folder / "out", model=model, num=12)
    trainer.wrap()
    zeroamp.load_hf(trainer.model, folder)
    trainer.train()
    stock = trainer_of(DDP, folder / "out", model=AutoModelForCausalLM.from_pretrained(folder), num=12)
    stock.train()
    return outcome(trainer).differences(outcome(stock), norms=False)


def test_a_model_that_is_built_on_the_meta_device(ranks2, tmp_path):
    llama(seed=4).save_pretrained(tmp_path)
    assert ranks2.run(_from_meta, tmp_path) == [[], []]


def _of_config(folder):
    """Optimizer and scheduler of the config, all "auto"."""
    cfg = {
        "optimizer": {"type": "AdamW",
                      "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                      "warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_type": "linear"}},
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
    }  # fmt: skip
    trainer = trainer_of(3, folder, cfg, num=20, warmup_steps=2, weight_decay=0.1)
    trainer.train()
    policy = trainer.policy_of(trainer.model)
    return outcome(trainer).rates, policy.mode, policy.train_batch_size, policy.scheduler.params.total_num_steps


def test_optimizer_and_scheduler_of_the_config(ranks2, tmp_path):
    for rates, mode, batch_size, total in ranks2.run(_of_config, tmp_path):
        assert mode == "bf16"
        assert (batch_size, total) == (4, 5)
        assert max(rates) == rates[3] == pytest.approx(1e-2)  # after 2 steps of warmup
        assert rates[1] < rates[3] > rates[4]


def _twice(folder):
    trainer = trainer_of(3, folder, num=12)
    trainer.train()
    hooks = len(trainer.model._forward_hooks)
    trainer.train()
    stock = trainer_of(DDP, folder, num=12)
    stock.train()
    stock.train()
    return outcome(trainer).differences(outcome(stock), norms=False), len(trainer.model._forward_hooks) - hooks


@pytest.mark.slow
def test_a_second_training_goes_on_with_model_and_optimizer(ranks2, tmp_path):
    assert ranks2.run(_twice, tmp_path) == [([], 0)] * 2
