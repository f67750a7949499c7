"""`lightning.pytorch.Trainer` with zeroamp: the losses of its own DDP runs, checkpoints, hooks, and what is refused."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zeroamp
from tests.processes.lightning_loops import fit, fitted, lightning_warnings, loader_of, module_of, trainer_of
from tests.processes.training import check_errors, errors_of, full_parameters, same_bits
from tests.selection import slow_but

pytest.importorskip("lightning")

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}


def _strategy(config=None, **more):
    from zeroamp.integrations.lightning import ZeroampStrategy

    return ZeroampStrategy(AUTOCAST if config is None else config, **more)


RUNS = [
    (0, {"max_epochs": 2, "accumulate_grad_batches": 5}),  # 6 batches per rank: the last step of an epoch has 1
    (1, {"val_check_interval": 3, "accumulate_grad_batches": 2}),  # validation between micro-batches
    (2, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    (3, {"max_epochs": 2}),
    (3, {"max_epochs": 2, "accumulate_grad_batches": 5}),
]


@pytest.mark.parametrize("case", slow_but(RUNS, RUNS[0], RUNS[3]), ids=str)
def test_losses_metrics_and_predictions_are_those_of_ddp(ranks2, tmp_path, case):
    stage, arguments = case
    ours = ranks2.run(_fitted, tmp_path, stage, arguments)
    theirs = ranks2.run(fitted, tmp_path, "ddp", "bf16-mixed", **arguments)
    for run, stock in zip(ours, theirs, strict=True):
        assert run.rates == stock.rates
        if stage < 2 or "accumulate_grad_batches" not in arguments:
            assert run.losses == stock.losses
            assert torch.equal(run.predictions, stock.predictions)
            assert run.metrics == stock.metrics
        else:
            # Stages 2 and 3 sum over ranks before micro-batches, DDP after: the last bits of fp32 sums differ, and
            # where an activation rounds to bf16, a last bit becomes 2^-8.
            assert run.losses == pytest.approx(stock.losses, rel=2**-7)


def _fitted(folder, stage, arguments):
    config = {**AUTOCAST, "zero_optimization": {"stage": stage}}
    return fitted(folder, _strategy(config), "bf16-mixed", **arguments)


def _clipped(folder, strategy):
    """Losses, and the norms that hooks see, with -1 for each call of zero_grad between them."""
    seen = []

    def on_before_optimizer_step(self, optimizer):
        gradients = [parameter.grad for parameter in self.parameters()]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
        seen.append(float(sum(gradient.double().square().sum() for gradient in whole).sqrt()))

    def on_before_zero_grad(self, optimizer):
        seen.append(-1.0)

    torch.manual_seed(0)
    module = module_of(on_before_optimizer_step=on_before_optimizer_step, on_before_zero_grad=on_before_zero_grad)
    strategy = _strategy({**AUTOCAST, "gradient_clipping": "auto"}) if strategy == "zeroamp" else strategy
    fit(module, folder, strategy, "bf16-mixed", gradient_clip_val=0.1)
    if strategy != "ddp":
        assert strategy.policy.gradient_clipping == 0.1
        assert strategy.report.grad_norm == pytest.approx(seen[-1], rel=1e-6)
    return module.losses, seen


def test_clipping_and_hooks_are_those_of_ddp(ranks2, tmp_path):
    """Clipping and hooks are those of DDP and hooks see gradients before clipping."""
    [(ours, seen), _], [(theirs, seen_there), _] = (ranks2.run(_clipped, tmp_path, name) for name in ("zeroamp", "ddp"))
    # torch adds norms of parameters in fp32, TrainStep squares in fp64: the factor may differ by an ulp (6e-8).
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert seen == pytest.approx(seen_there, rel=1e-4)
    assert max(seen) > 0.2  # clipped to 0.1 afterwards


def _resumed(folder, stage, is_meta):
    """Fit 2 epochs; fit again from the checkpoint after the first. Return what the second fit has otherwise."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    fits = []
    for seed, ckpt_path in ((0, None), (99, folder / "step=6.ckpt")):
        torch.manual_seed(seed)
        module = module_of(is_meta=is_meta, dropout=0.1, epoch_schedule=True)
        saving = ModelCheckpoint(
            folder, filename="{step}", monitor="val", save_top_k=-1, save_last=True, every_n_epochs=1
        )
        strategy = _strategy({**AUTOCAST, "zero_optimization": {"stage": stage}})
        more = {"enable_checkpointing": True, "callbacks": [saving], "max_epochs": 2}
        trainer = fit(module, folder, strategy, ckpt_path=ckpt_path, **more)
        numbers = trainer.global_step, strategy.train_step.num_steps, saving.best_model_score.item()
        fits.append((module.losses, module.rates, numbers, full_parameters(module)))
    (losses, rates, numbers, parameters), (later, later_rates, later_numbers, later_parameters) = fits
    assert (len(losses), len(later)) == (12, 6)
    assert numbers == later_numbers
    assert (later, later_rates) == (losses[6:], rates[6:])
    return same_bits(later_parameters, parameters)


@pytest.mark.parametrize(("stage", "is_meta"), [(3, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_a_resumed_fit_is_the_uninterrupted_one(ranks2, tmp_path, stage, is_meta):
    assert ranks2.run(_resumed, tmp_path, stage, is_meta) == [[], []]


def _resumed_within_an_epoch(folder, *, is_ddp):
    """A fit that resumes in an epoch, from a checkpoint by the number of steps: losses, and files."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    found = []
    for ckpt_path in (None, folder / "step=2.ckpt"):
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        torch.manual_seed(0)
        module = module_of(dropout=0.0)
        arguments = {"accumulate_grad_batches": 2, "enable_checkpointing": True, "callbacks": [saving]}
        with lightning_warnings():
            strategy = "ddp" if is_ddp else _strategy({**AUTOCAST, "zero_optimization": {"stage": 0}})
            fit(module, folder, strategy, "bf16-mixed", ckpt_path=ckpt_path, **arguments)
        found.append(module.losses)
    dist.barrier()
    return found, sorted(path.name for path in folder.iterdir())


def test_a_fit_resumes_within_an_epoch(ranks2, tmp_path):
    """A fit resumes within an epoch and does not save again while it accumulates."""
    ours = ranks2.run(_resumed_within_an_epoch, tmp_path / "zeroamp", is_ddp=False)
    theirs = ranks2.run(_resumed_within_an_epoch, tmp_path / "ddp", is_ddp=True)
    assert [losses for losses, _ in ours] == [losses for losses, _ in theirs]
    assert [names for _, names in ours] == [["step=2.ckpt"]] * 2


def _weights(folder):
    """A file of weights alone is Lightning's own; `barebones`, `overfit_batches`, validate before a fit, test after."""
    torch.manual_seed(0)
    module = module_of()
    trainer = trainer_of(folder, _strategy(), overfit_batches=2)
    with lightning_warnings():
        trainer.validate(module, loader_of(8), verbose=False)
        trainer.fit(module, loader_of(), loader_of(8))
        trainer.test(module, loader_of(8), verbose=False)
        trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
        barebones = module_of()
        unset = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"))
        trainer_of(folder, _strategy(), barebones=True, **unset).fit(barebones, loader_of(8), loader_of(8))
    plain = module_of()
    plain.load_state_dict(torch.load(folder / "weights.ckpt")["state_dict"])
    different = same_bits(full_parameters(plain), full_parameters(module))
    return different, len(module.losses), len(barebones.losses)


@pytest.mark.slow
def test_weights_alone_are_a_plain_file_and_other_ways_to_run_work(ranks2, tmp_path):
    assert ranks2.run(_weights, tmp_path) == [([], 2, 2)] * 2


def _refused(folder):
    from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging

    def backward(self, loss):
        loss.backward()

    manual = module_of()
    manual.automatic_optimization = False
    clipped, counted = {**AUTOCAST, "gradient_clipping": 1.0}, {**AUTOCAST, "gradient_accumulation_steps": 2}
    uneven = {"accumulate_grad_batches": 2, "val_check_interval": 3, "enable_checkpointing": True}
    calls = {
        "sync_batchnorm": (module_of(), _strategy(), {"sync_batchnorm": True}),
        "bf16-true": (module_of(), _strategy(), {"precision": "bf16-true"}),
        "backward": (module_of(backward=backward), _strategy(), {}),
        "manual": (manual, _strategy(), {}),
        "clipping": (module_of(), _strategy(clipped), {"gradient_clip_val": 2.0}),
        "accumulation": (module_of(), _strategy(counted), {"accumulate_grad_batches": 3}),
        "policy": (module_of(), _strategy(zeroamp.policy_from_config(counted)), {"accumulate_grad_batches": 3}),
        "compiled": (torch.compile(module_of(), backend="eager"), _strategy(), {}),
        "averaging": (module_of(), _strategy(), {"callbacks": [StochasticWeightAveraging(1e-3)]}),
        "accumulating": (module_of(), _strategy(), {**uneven, "callbacks": [ModelCheckpoint(folder, monitor="val")]}),
    }
    return errors_of({
        name: partial(fit, module, folder, strategy, **arguments)
        for name, (module, strategy, arguments) in calls.items()
    })  # fmt: skip


REFUSED = {
    "sync_batchnorm": "ConfigError: .*sync_batchnorm",
    "bf16-true": 'ConfigError: .*"bf16": {"enabled": true}',
    "backward": "ConfigError: .*LightningModule.backward",
    "manual": "ConfigError: .*automatic_optimization.*zeroamp.wrap_model",
    "clipping": "(?s)ConfigError: .*gradient_clipping.*gradient_clip_val",
    "accumulation": "(?s)ConfigError: .*gradient_accumulation_steps.*accumulate_grad_batches",
    "policy": "(?s)ConfigError: .*gradient_accumulation_steps.*accumulate_grad_batches",
    "compiled": "ConfigError: .*torch.compile",
    "averaging": "ConfigError: .*StochasticWeightAveraging",
    "accumulating": "CheckpointError: .*inside an optimizer step.*val_check_interval",
}


def test_what_does_not_go_is_refused_by_name(ranks2, tmp_path):
    check_errors(ranks2.run(_refused, tmp_path), REFUSED)


def test_the_names_are_registered():
    from lightning.pytorch.strategies import StrategyRegistry

    import zeroamp.integrations.lightning  # noqa: F401

    assert {"zeroamp", *(f"zeroamp_stage_{stage}" for stage in range(4))} <= set(
        StrategyRegistry.available_strategies()
    )
