"""What does not fit is refused on all ranks by a text that names the difference, and nothing has been changed."""

import re
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.processes.checkpoint_training import Case, Small, Training, WithoutFrozen, error_of, refused

FP16 = {"dtype": "float16"}


class Other(Small):
    """Another dtype, shape and tie, a buffer more."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(6, dtype=torch.bfloat16), requires_grad=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())
        self.register_buffer("num_seen", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("table", torch.ones(2))


class Deeper(Small):
    def __init__(self):
        super().__init__()
        self.blocks.extend(type(self.blocks[0])() for _ in range(2))


MISFITS = {
    "missing": (Case(build=WithoutFrozen), ["frozen (checkpoint: [6] float32, model: none). "]),
    "other": (
        Case(build=Other),
        [
            "frozen (checkpoint: [6] float32, model: [6] bfloat16), head.weight (checkpoint: none, ",
            "num_seen (checkpoint: [] int64, model: [] float32)",
            "scale (checkpoint: [1] float32, model: [6] float32), table (checkpoint: none, ",
        ],
    ),
    "deeper": (Case(build=Deeper), ["blocks.2.down.weight (", " and 5 more. "]),
    "class": (Case(optimizer="momentum"), ["the state of torch.optim.AdamW, ", "is torch.optim.SGD. "]),
    "number of groups": (Case(optimizer="two groups"), ["param groups", "They differ in blocks.0.down.weight, "]),
    "groups": (Case(optimizer="some only"), ["They differ in blocks.0.down.weight, ", " and 6 more. "]),
    "frozen left out": (Case(optimizer="trainable only"), ["They differ in frozen. "]),
    "scheduler": (
        Case(scheduler="cosine"),
        ["with no scheduler, ", "has torch.optim.lr_scheduler.CosineAnnealingLR. "],
    ),
    "loss scale": (Case(options=FP16), ["a switched-off scale at 1", "of a dynamic scale"]),
}


def _misfits(folder):
    """Load a checkpoint into everything that it does not fit; return by name the error and what changed."""
    Training(Case()).run(0, 1).save(folder)
    found = {}
    for name, (case, _) in MISFITS.items():
        training = Training(case, seed=7)
        if not case.options:  # in float16 the first steps overflow
            training.run(0, 1)
        found[name] = refused(training, training.load, folder)
    return found


def test_what_does_not_fit_is_named_on_all_ranks_and_changes_nothing(ranks2, tmp_path):
    for found in ranks2.run(_misfits, str(tmp_path)):
        for name, (_, words) in MISFITS.items():
            error, changed = found[name]
            kind = "StepError: " if name == "loss scale" else f"CheckpointError: {tmp_path}"
            assert error.startswith(kind), name
            assert [part for part in words if part not in error] == [], error
            assert changed == [], name


class Code:
    """What a pickle would have to run code for."""


def _at_the_wrong_time(folder):
    training = Training(Case(options={"accumulation": 2}, scheduler="cosine")).run(0, 1)
    training.save(folder)
    save, load, rank = training.save, training.load, dist.get_rank()
    where = re.escape(str(folder))
    for call, words in (
        (partial(save, folder, keep=0), r"save_checkpoint\(keep=\) .*>= 1.* 0\."),
        (
            partial(zeroamp.save_checkpoint, folder, training.model, training.optimizer),
            "save_checkpoint.train=. .*a TrainStep",
        ),
        (
            partial(zeroamp.load_checkpoint, folder, training.model, training.optimizer),
            "load_checkpoint.train=. .*of AdamW",
        ),
        (partial(save, folder, step=2.0), r"save_checkpoint\(step=\) .*>= 0.* 2\.0\."),
        (partial(save, folder, step=rank), "save_checkpoint .*same step .*0 and 1"),
        (partial(save, folder, extra=Code()), "extra .*cannot be saved: .*Convert it"),
        (partial(save, folder, extra=Code() if rank else None), "rank 1: extra .*cannot be saved: "),
        (partial(load, f"{folder}/nothing" if rank else folder), "load_checkpoint needs the same folder on all ranks"),
        (
            partial(load, folder, load_optimizer_states=rank == 0),
            "load_checkpoint needs the same load_optimizer_states on all ranks",
        ),
        (partial(load, f"{folder}/nothing"), f"{where}/nothing holds no checkpoint"),
        (partial(load, f"{folder}/latest"), f"rank 0: {where}/latest .*a file.*Check the path"),
        (
            partial(load, f"{folder}/step_2", missing_ok=True),
            f"rank 0: {where}/step_2 .*does not exist.*Check the path",
        ),
    ):
        error, changed = refused(training, call)
        assert re.match(f"CheckpointError: {words}", error, re.DOTALL), error
        assert changed == []
    assert training.load(f"{folder}/nothing", missing_ok=True) is None
    training.train.backward(training.model(torch.arange(4)[None]))
    training.train.step()
    for call in (save, load):
        assert re.match("StepError: .*state_dict.* 1 micro-batch", error_of(call, folder))
    training.train.backward(training.model(torch.arange(4)[None]))
    training.train.step()
    save(folder)


def test_calls_at_the_wrong_time_or_with_wrong_values(ranks2, tmp_path):
    ranks2.run(_at_the_wrong_time, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001", "step_00000002"]


def _one_rank_fails(folder):
    """On rank 1 alone the checkpoint does not fit: rank 0 must not take the counts of steps over either."""
    Training(Case()).run(0, 2).save(folder)
    training = Training(Case(), seed=7).run(0, 1)
    if dist.get_rank() == 1:
        group = training.optimizer.param_groups[0]
        training.optimizer.add_param_group({**group, "params": [group["params"].pop()]})
    return refused(training, training.load, folder)


def test_what_one_rank_refuses_changes_nothing_on_the_others(ranks2, tmp_path):
    for error, changed in ranks2.run(_one_rank_fails, str(tmp_path)):
        assert error.startswith(f"CheckpointError: rank 1: {tmp_path}")
        assert changed == []


class AdamW(torch.optim.SGD):
    """Another class of the same name."""


class CosineAnnealingLR(torch.optim.lr_scheduler.LinearLR):
    """Another class of the same name."""


def _other_classes_of_the_same_name(folder):
    saved = Training(Case(scheduler="cosine")).run(0, 1)
    saved.save(folder)
    other = Training(Case(optimizer=lambda parameters: AdamW(parameters, lr=0.1)))
    errors = [error_of(other.load, folder)]
    other = Training(Case())
    other.train = zeroamp.TrainStep(other.model, other.optimizer, CosineAnnealingLR(other.optimizer))
    errors.append(error_of(other.load, folder))
    return errors


def test_classes_of_the_same_name_from_other_modules_are_refused(ranks2, tmp_path):
    for errors in ranks2.run(_other_classes_of_the_same_name, tmp_path):
        assert (
            "state of torch.optim.AdamW, but the optimizer of TrainStep is tests.zeroamp.checkpoint.test_fit.AdamW"
            in errors[0]
        )
        assert "with torch.optim.lr_scheduler.CosineAnnealingLR, but " in errors[1]
        assert "has tests.zeroamp.checkpoint.test_fit.CosineAnnealingLR" in errors[1]
