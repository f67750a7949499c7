"""Checkpoints of `ZeroampTrainer`: `from_pretrained` reads them, and a training goes on from each bit for bit."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.measuring.logs import log_lines
from tests.processes.trainer import DDP, examples, outcome, parameters_of, trainer_of
from tests.selection import slow_but

pytest.importorskip("transformers", reason="its Trainer is what these checkpoints are for")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")


def _tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), pad_token="a")


def _trainer(kind, folder, cfg=None, **changes):
    given = {"train_dataset": examples(12), "eval_dataset": examples(4, 1), "processing_class": _tokenizer()}
    keys = {
        "save_strategy": "steps",
        "save_steps": 2,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        **changes,
    }
    trainer = trainer_of(kind, folder, cfg, trainer_arguments=given, **keys)
    trainer.data_collator = _padded
    return trainer


def _padded(features):
    return {key: torch.stack([each[key] for each in features]) for key in features[0]}


def _resumed(folder, stage, cfg, changes):
    trainer = _trainer(stage, folder, cfg, **changes)
    trainer.train()
    expected, found = outcome(trainer), {}
    saved = sorted(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    for path in saved:
        other = _trainer(stage, Path(folder) / "again", cfg, **{**changes, "save_strategy": "no"})
        other.train(resume_from_checkpoint=str(path))
        found[path.name] = outcome(other).differences(expected)
    return found, len(expected.losses)


@pytest.mark.parametrize("case", slow_but([(3, "bf16"), (1, "fp16")], (3, "bf16")))
def test_a_training_goes_on_from_every_save_bit_for_bit(ranks2, tmp_path, case):
    """3 micro-batches an epoch in steps of 2 and 1: saves inside of an epoch and at its end, before an odd step."""
    stage, precision = case
    cfg = {"torch_autocast": {"enabled": "auto", "dtype": "auto"}}
    changes = {"max_grad_norm": 0.5, "save_steps": 1, "bf16": precision == "bf16", "fp16": precision == "fp16"}
    if precision == "fp16":
        cfg["fp16"] = {"initial_scale_power": 20, "hysteresis": 1}
    for found, num_steps in ranks2.run(_resumed, tmp_path, stage, cfg, changes):
        assert num_steps == 4
        assert found == {f"checkpoint-{step}": [] for step in range(1, 5)}


class _KilledError(Exception):
    """Ends a training where its process would have been killed."""


def _killed_at(name, step=4):
    """Return a patch that ends the training inside of its save at a step, in a method of the Trainer."""
    from transformers import Trainer

    real = getattr(Trainer, name)

    def save(self, *args):
        if self.state.global_step != step or (name == "_save_rng_state" and dist.get_rank() == 0):
            return real(self, *args)
        if name == "_save_checkpoint":  # the last file is the Trainer's state
            real(self, *args)
            Path(self.args.output_dir, "checkpoint-4", "trainer_state.json").write_text('{"global_step": 4')
        raise _KilledError

    return mock.patch.object(Trainer, name, save)


def _killed_inside_a_save(folder, name, rounds):
    """Train, be killed at step 4, and resume; each round of it. Return what differs from a training without kills."""
    expected, run = _trainer(3, folder / "whole"), folder / "killed"
    expected.train()
    for _ in range(rounds):  # in the second round there is a whole checkpoint of this step already
        with _killed_at(name), suppress(_KilledError, zeroamp.CheckpointError):
            _trainer(3, run).train()
        dist.barrier()
        with pytest.raises(zeroamp.CheckpointError, match="checkpoint-4.*=True takes the newest complete"):
            _trainer(3, run).train(resume_from_checkpoint=str(run / "checkpoint-4"))
        resumed = _trainer(3, run)
        resumed.train(resume_from_checkpoint=True)
    again = _trainer(3, run)
    again.train(resume_from_checkpoint=True)
    return outcome(resumed).differences(outcome(expected)), again.state.global_step


@pytest.mark.parametrize(
    "case",
    slow_but([("_save_scaler", 2), ("_save_rng_state", 1), ("_save_checkpoint", 1)], ("_save_rng_state", 1)),
    ids=str,
)
def test_a_killed_trainer_resumes_from_the_checkpoint_before(ranks2, tmp_path, case):
    """A trainer that was killed inside a save resumes from the checkpoint before."""
    found = ranks2.run(_killed_inside_a_save, tmp_path, *case)
    assert found[0] == found[1]
    assert found[0] == ([], 4)


def _killed_inside_the_first_save(folder):
    expected, run = _trainer(3, folder / "whole"), folder / "killed"
    expected.train()
    with _killed_at("_save_rng_state", step=2), suppress(_KilledError, zeroamp.CheckpointError):
        _trainer(3, run).train()
    dist.barrier()
    names = sorted(path.name for path in run.glob("checkpoint-*"))
    restarted = _trainer(3, run)
    with log_lines(logging.WARNING) as texts:
        restarted.train(resume_from_checkpoint=True)
    return names, texts, outcome(restarted).differences(outcome(expected))


def test_a_trainer_that_was_killed_inside_its_first_save_starts_anew(ranks2, tmp_path):
    for rank, (names, texts, found) in enumerate(ranks2.run(_killed_inside_the_first_save, tmp_path)):
        assert names == ["checkpoint-2"]
        text = f"The training starts anew: the saves of {tmp_path}/killed/checkpoint-2 did not end."
        assert (text in texts) == (rank == 0), (rank, texts)
        assert found == []


def _saved(folder):
    trainer = _trainer(3, folder, save_total_limit=1)
    trainer.train()
    trainer.save_model()
    return parameters_of(trainer.model)


def test_a_checkpoint_is_what_from_pretrained_reads(ranks2, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.processes.trainer import fresh

    parameters = ranks2.run(_saved, tmp_path)[0]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]  # save_total_limit
    for folder in (tmp_path, tmp_path / "checkpoint-4"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for name, value in model.named_parameters():
            assert torch.equal(value, parameters[name]), name
        assert AutoTokenizer.from_pretrained(folder).pad_token == "a"
        fresh()
        args = torch.load(folder / "training_args.bin", weights_only=False)
        assert args.zeroamp["zero_optimization"] == {"stage": 3}
    assert {"zeroamp", "scheduler.pt", "trainer_state.json"} <= set(os.listdir(tmp_path / "checkpoint-4"))
    assert "optimizer.pt" not in os.listdir(tmp_path / "checkpoint-4")


def _best(folder, in_16_bits):
    cfg = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": in_16_bits}}
    trainer = _trainer(
        3, folder, cfg, load_best_model_at_end=True, eval_strategy="steps", eval_steps=1, save_steps=1,
        learning_rate=0.3, save_only_model=not in_16_bits,
    )  # fmt: skip
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    best = Path(trainer.state.best_model_checkpoint).name
    return best, losses, trainer.evaluate()["eval_loss"], parameters_of(trainer.model)


@pytest.mark.parametrize(
    "in_16_bits", slow_but([False, True], True), ids=["weights alone", "files of 16 bits beside the state"]
)
def test_the_best_model_is_loaded_at_the_end_in_fp32(ranks2, tmp_path, in_16_bits):
    from safetensors.torch import load_file

    best, losses, now, parameters = ranks2.run(_best, tmp_path, in_16_bits)[0]
    assert now == min(losses) == losses[int(best.removeprefix("checkpoint-")) - 1]
    assert losses[-1] > now  # the last is not the best
    saved = load_file(tmp_path / best / "model.safetensors")
    dtype = torch.bfloat16 if in_16_bits else torch.float32
    assert {value.dtype for value in saved.values()} == {dtype}
    assert all(torch.equal(parameters[name].to(dtype), value) for name, value in saved.items())
    assert all(torch.equal(parameters[name], value.float()) for name, value in saved.items()) is not in_16_bits
    assert (tmp_path / best / "zeroamp").exists() is in_16_bits


def _resumed_from_weights(folder):
    """`save_only_model`: as the stock Trainer, the weights are those of the checkpoint, and the optimizer is new."""
    found = []
    for kind in (DDP, 3):
        own = Path(folder) / str(kind)
        trainer = _trainer(kind, own, save_only_model=True)
        trainer.train()
        other = _trainer(kind, own, save_only_model=True)
        other.train(resume_from_checkpoint=True)  # the last of the folder: nothing is left to train
        longer = _trainer(kind, own, save_strategy="no", num_train_epochs=3, lr_scheduler_type="constant")
        longer.train(resume_from_checkpoint=str(own / "checkpoint-4"))
        found.append(outcome(longer))
    # Steps of the stock run before the checkpoint were at stage 0, so accumulated in another order.
    return torch.allclose(torch.tensor(found[0].losses), torch.tensor(found[1].losses), atol=1e-4), len(found[1].losses)


@pytest.mark.slow
def test_a_training_from_weights_alone(ranks2, tmp_path):
    assert ranks2.run(_resumed_from_weights, tmp_path) == [(True, 6)] * 2


def _refused(folder):
    _trainer(DDP, folder).train()
    dist.barrier()
    for name, says in (
        ("checkpoint-2", "no Trainer on zeroamp saved it. Pass the weights"),  # of the stock Trainer
        ("empty", "neither a folder zeroamp nor weights alone"),
    ):
        with pytest.raises(zeroamp.CheckpointError, match=says):
            _trainer(3, folder / "other").train(resume_from_checkpoint=str(folder / name))


def test_other_folders_are_refused(ranks2, tmp_path):
    (tmp_path / "empty").mkdir()
    ranks2.run(_refused, tmp_path)


def _preempted(folder):
    """The callback of docs/transformers.md, and a signal to one rank."""
    import re
    import signal

    from transformers import TrainerCallback

    page = (Path(__file__).parents[3] / "docs" / "transformers.md").read_text()
    names = {}
    exec(re.search(r"```python[^\n]*\n(import signal\n.*?)```", page, re.DOTALL)[1], names)

    class Signal(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1 and dist.get_rank() == 1:
                signal.raise_signal(signal.SIGTERM)

    trainer = _trainer(3, folder, save_steps=100)
    for callback in (Signal(), names["Preempted"]()):
        trainer.add_callback(callback)
    trainer.train()
    return trainer.state.global_step


def test_a_signal_to_one_rank_saves_and_stops_all(ranks2, tmp_path):
    steps = ranks2.run(_preempted, tmp_path)
    assert steps[0] == steps[1] in (2, 3)
    assert (tmp_path / f"checkpoint-{steps[0]}" / "zeroamp").is_dir()
