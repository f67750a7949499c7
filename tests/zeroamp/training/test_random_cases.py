"""Random models, configs and optimizers: every bit of plain torch in one process, or an error of zeroamp.

The fast tier runs the same cases each time. The slow tier's seed is the week of the year, and is printed.
"""

import collections
import dataclasses
import datetime
import random
import types
from functools import partial

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.small import batch, build
from tests.oracles import one_process
from tests.processes.training import same_bits, train
from tests.selection import SUMS_ARE_IN_FP32

NUM_STEPS = 2
FP16_SCALE = 1024.0
CASES_PER_CALL = 10  # a call on ranks makes process groups, and has a time limit
LOW = {"autocast bf16": torch.bfloat16, "autocast fp16": torch.float16, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAFE_CLASSES = {
    "default": (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "torch.nn.Linear": (nn.Linear,),
    "Linear Conv2d": (nn.Linear, nn.Conv2d),
    "auto": (),
    "NoSuchModule": (),
}
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True, amsgrad=True),
    "Adam": partial(torch.optim.Adam, lr=1e-3, betas=(0.8, 0.95), weight_decay=0.01),
    "Adamax": partial(torch.optim.Adamax, lr=1e-3),
    "NAdam": partial(torch.optim.NAdam, lr=1e-3),
    "RAdam": partial(torch.optim.RAdam, lr=1e-3),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
}
ZERO_KEYS = {
    "none": {},
    "group per unit": {"stage3_param_persistence_threshold": 0},
    "large units alone": {"stage3_param_persistence_threshold": 1500},
    "prefetch": {"stage3_prefetch_bucket_size": 20_000},
    "live": {"stage3_max_live_parameters": 15_000},
    "hpz": {"zero_hpz_partition_size": 2},
    "no overlap": {"overlap_comm": False},
    "unknown": {"stage3_no_such_key": 1},
}
OWN_KEYS = {"none": {}, "dimension 0": {"shard_dim": 0}, "no own units": {"own_units": False}}
OFFLOADS = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
}


def _freeze_every_third(model):
    for parameter in list(model.parameters())[::3]:
        parameter.requires_grad_(False)


def _freeze_norms(model):
    for fqn, parameter in model.named_parameters():
        if "norm" in fqn:
            parameter.requires_grad_(False)


PREPARES = {"none": None, "every third is frozen": _freeze_every_third, "norms are frozen": _freeze_norms}
USUAL = "none", "default"
"""Drawn as often as all other values of a field together."""
CHOICES = {
    "model": (
        "two_blocks", "two_blocks_untied", "conv", "encoder", "moe", "hf_llama", "odd_rows", "skips",
        "odd_bank",
    ),
    "mode": ("autocast bf16", "autocast bf16", "autocast fp16", "bf16", "fp16", "fp32"),
    "stage": (0, 1, 2, 3),
    "mesh": (None, None, None, (1, 2), (2, 1)),
    "accumulation": (1, 1, 2, 3, 4),
    "clip": (0.0, 0.05, 0.5, 100.0),
    "communication": ("none", *DTYPES),
    "safe": tuple(SAFE_CLASSES),
    "optimizer": tuple(OPTIMIZERS),
    "num_groups": (1, 2),
    "zero": tuple(ZERO_KEYS),
    "own": tuple(OWN_KEYS),
    "offload": tuple(OFFLOADS),
    "prepare": tuple(PREPARES),
}  # fmt: skip


class Case(types.SimpleNamespace):
    """One value of each of CHOICES."""

    def config(self):
        """The case as a user writes it."""
        cfg = {
            "zero_optimization": {"stage": self.stage, **ZERO_KEYS[self.zero], **OFFLOADS[self.offload]},
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zeroamp": OWN_KEYS[self.own],
        }
        if self.mode.startswith("autocast"):
            cfg["torch_autocast"] = {"enabled": True, "dtype": str(LOW[self.mode]).removeprefix("torch.")}
            if self.safe != "default":
                classes = self.safe if self.safe == "auto" else self.safe.split()
                cfg["torch_autocast"]["lower_precision_safe_modules"] = classes
        elif self.mode != "fp32":
            cfg[self.mode] = {"enabled": True}
        if "fp16" in self.mode:
            cfg.setdefault("fp16", {})["loss_scale"] = FP16_SCALE
        if self.safe == "auto":  # the oracle does not know which gradients are then sent in low precision
            cfg["communication_data_type"] = "fp32"
        elif self.communication != "none":
            cfg["communication_data_type"] = self.communication
        return cfg

    def make_optimizer(self, named):
        """The optimizer of {fqn: parameter}, with a learning rate for each group."""
        parameters = [parameter for parameter in named.values() if parameter.requires_grad]
        groups = [{"params": parameters[at :: self.num_groups]} for at in range(self.num_groups)]
        optimizer = OPTIMIZERS[self.optimizer](groups)
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] /= 1 + number
        return optimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank saw of a case: a Run, or an error."""

    run: object = None
    refusal: str = ""
    foreign: str = ""


def cases(seed, number):
    """Draw cases."""
    draw = random.Random(seed)
    drawn = [Case(**{name: _draw(draw, values) for name, values in CHOICES.items()}) for _ in range(number)]
    for case in drawn:
        if SUMS_ARE_IN_FP32 and case.model == "two_blocks" and case.stage < 2 and case.accumulation > 1:
            case.model = "two_blocks_untied"
    return drawn


def _draw(draw, values):
    return values[0] if values[0] in USUAL and draw.random() < 0.75 else draw.choice(values)


def _run_cases(several):
    return [_run_case(case) for case in several]


def _run_case(case):
    example = None
    if case.safe == "auto":
        tokens = batch(case.model, 0)
        example = {"input_ids": tokens, "labels": tokens} if case.model == "hf_llama" else (tokens,)
    options = {"mesh_shape": case.mesh, "prepare_before": PREPARES[case.prepare], "example": example}
    try:
        return Outcome(run=train(case.model, case.config(), NUM_STEPS, make_optimizer=case.make_optimizer, **options))
    except zeroamp.ZeroAmpError as error:
        return Outcome(refusal=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    except Exception as error:  # what no case may raise
        return Outcome(foreign=f"{type(error).__name__}: {error}")


def _oracle(case):
    low = LOW.get(case.mode)
    is_autocast = case.mode.startswith("autocast")
    return one_process.train(
        case.model,
        world_size=2,
        num_steps=NUM_STEPS,
        accumulation=case.accumulation,
        autocast=low if is_autocast else None,
        low_model=None if is_autocast else low,
        clip=case.clip,
        reduce_each=case.stage >= 2,
        num_replicas=2 if case.mesh == (2, 1) else 1,
        prepare=PREPARES[case.prepare],
        loss_scale=FP16_SCALE if "fp16" in case.mode else 1.0,
        make_optimizers=lambda named: [case.make_optimizer(named)],
        sent_as=_sent_as(case),
    )


def _sent_as(case):
    """The dtype of gradients between the ranks that shard, be it one.

    At stage 0 sums over ranks are sent in fp32. At stage 1 sums of micro-batches are, by default.
    """
    if case.stage == 0 or case.safe == "auto":
        return {}
    if case.stage == 1 and case.accumulation > 1 and case.communication == "none":
        return {}
    dtype = DTYPES.get(case.communication, LOW.get(case.mode, torch.float32))
    model = build(case.model)
    owners = collections.defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter].append(module)
    classes = SAFE_CLASSES[case.safe] if case.mode.startswith("autocast") else (nn.Module,)
    named = model.named_parameters()
    return {fqn: dtype for fqn, p in named if all(isinstance(owner, classes) for owner in owners[p])}


def _check(ranks, drawn):
    """Compare all cases. Print how many were refused by which message; fail with all that are wrong."""
    refusals, wrong, num_exact = collections.Counter(), [], 0
    for start in range(0, len(drawn), CASES_PER_CALL):
        some = drawn[start : start + CASES_PER_CALL]
        for case, *outcomes in zip(some, *ranks.run(_run_cases, some), strict=True):
            errors = {outcome.foreign for outcome in outcomes if outcome.foreign}
            if errors or len({bool(outcome.refusal) for outcome in outcomes}) > 1:
                wrong.append(f"{case}\n    {errors or outcomes}")
            elif outcomes[0].refusal:
                refusals[outcomes[0].refusal] += 1
            elif (text := _difference(case, outcomes)) is not None:
                wrong.append(f"{case}\n    {text}")
            else:
                num_exact += 1
    print(f"{len(drawn)} cases: {num_exact} exact, {len(wrong)} wrong, {refusals.total()} refused")
    for text, number in refusals.most_common():
        print(f"    {number} x {text}")
    assert wrong == [], "\n".join(wrong)
    return num_exact, refusals


def _difference(case, outcomes):
    losses, norms, parameters = _oracle(case)
    for rank, run in enumerate(outcome.run for outcome in outcomes):
        expected = [of_ranks[rank] for of_ranks in losses]
        if (run.losses, run.norms) != (expected, norms):
            return f"rank {rank}: losses {run.losses} instead of {expected}, norms {run.norms} instead of {norms}"
        if differing := same_bits(run.parameters, parameters):
            return f"rank {rank}: {len(differing)} of {len(parameters)} parameters, the first is {differing[0]}"
    return None


def test_25_random_cases_have_the_bits_of_one_process_or_are_refused(ranks2):
    drawn = cases(7424, 25)
    for name, values in CHOICES.items():
        assert {getattr(case, name) for case in drawn} == set(values), name
    num_exact, refusals = _check(ranks2, drawn)
    assert num_exact >= 13
    assert refusals


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(2))
def test_30_more_random_cases_of_this_week(ranks2, chunk):
    year, week, _ = datetime.date.today().isocalendar()
    seed = 100 * year + week
    print(f"cases({seed}, 60)[{30 * chunk}:{30 * chunk + 30}]")
    _check(ranks2, cases(seed, 60)[30 * chunk : 30 * chunk + 30])
