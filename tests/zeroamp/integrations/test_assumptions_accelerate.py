"""What `ZeroampAccelerator` assumes of accelerate beyond its public names. A failure says which code stands on it.

To upgrade accelerate: read the named code, change it, then this table.
"""

import inspect
import re

import pytest

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

CODE = "zeroamp/integrations/accelerate/"


def _source(function):
    return re.sub(r"\s+", " ", inspect.getsource(function))


def _accelerator(name):
    return getattr(accelerate.Accelerator, name)


ASSUMPTIONS = {
    "prepare() calls prepare_model, prepare_optimizer and prepare_scheduler, the schedulers last": (
        lambda: _source(_accelerator("_prepare_one")),
        ["self.prepare_model(", "self.prepare_optimizer(", "self.prepare_scheduler("],
        "accelerator.py: prepare",
    ),
    "prepare() wraps in the order of its arguments, by _prepare_one": (
        lambda: _source(_accelerator("prepare")),
        ["self._prepare_one(obj, first_pass=True", "item in container"],
        "accelerator.py: prepare wraps all models before super().prepare",
    ),
    "lists of what is prepared": (
        lambda: _source(_accelerator("__init__")),
        ["self._models = []", "self._optimizers = []", "self._dataloaders = []", "self.state = AcceleratorState("],
        "accelerator.py: __init__, prepare_model, save_state, fill_policy",
    ),
    "backward divides the loss, in its own dtype": (
        lambda: _source(_accelerator("backward")),
        ["loss = loss / self.gradient_accumulation_steps"],
        "accelerator.py: backward",
    ),
    "accumulate() sets sync_gradients and enters no_sync of each model": (
        lambda: _source(_accelerator("accumulate")),
        ["self._do_sync()", "self.no_sync(m)", 'plugin_kwargs.get("sync_each_batch", False)'],
        "accelerator.py: backward, no_sync",
    ),
    "save_state() asks get_state_dict for weights, then calls the hooks, then saves what is left in the list": (
        lambda: _source(_accelerator("save_state")),
        ["weights.append(self.get_state_dict(model, unwrap=False))", "hook(self._models, weights, output_dir)",
         "optimizers = self._optimizers", "save_accelerator_state( output_dir, weights, optimizers,"],
        "accelerator.py: save_state, _save_checkpoint, get_state_dict",
    ),
    "load_state() calls the hooks with a list of models, then loads what is left in it": (
        lambda: _source(_accelerator("load_state")),
        ["models.append(model)", "hook(models, input_dir)", "load_accelerator_state( input_dir, models, optimizers,"],
        "accelerator.py: load_state, _load_checkpoint",
    ),
    "an optimizer steps and clears gradients at the end of an optimizer step only": (
        lambda: _source(accelerate.optimizer.AcceleratedOptimizer),
        ["if self.gradient_state.sync_gradients:", "return self._is_overflow"],
        "optimizer.py",
    ),
    "a scheduler does not step where an optimizer's step was skipped, and once for each rank": (
        lambda: _source(accelerate.scheduler.AcceleratedScheduler.step),
        ["if opt.step_was_skipped: return", "if self.split_batches:", "for _ in range(num_processes):"],
        "accelerator.py: prepare_scheduler; optimizer.py: updated",
    ),
    "outputs of a forward become fp32 under mixed precision": (
        lambda: _source(_accelerator("prepare_model")),
        ["convert_outputs_to_fp32("],
        "accelerator.py: _outputs_to_fp32",
    ),
    "the environment variables of accelerate launch": (
        lambda: _source(_accelerator("__init__")),
        ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM",
         "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"],
        "arguments.py: refuse_arguments",
    ),
}  # fmt: skip
"""Assumption -> the source that holds it, what must be in that source, and the code that stands on it."""


@pytest.mark.parametrize("assumption", ASSUMPTIONS)
def test_accelerate_still_does(assumption):
    source, expected, code = ASSUMPTIONS[assumption]
    found = source()
    missing = [text for text in expected if text not in found]
    assert not missing, (
        f"accelerate {accelerate.__version__} no longer holds: {assumption}. Missing in its source: {missing}. "
        f"{CODE}{code} stands on it."
    )


KNOWN = {
    "device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu", "dataloader_config",
    "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "rng_types", "log_with", "project_dir",
    "project_config", "gradient_accumulation_plugin", "step_scheduler_with_optimizer", "kwargs_handlers",
    "dynamo_backend", "dynamo_plugin", "deepspeed_plugins", "parallelism_config",
}  # fmt: skip


def test_every_argument_of_the_constructor_is_known():
    new = set(inspect.signature(accelerate.Accelerator.__init__).parameters) - KNOWN - {"self"}
    assert not new, (
        f"accelerate {accelerate.__version__} has new arguments of Accelerator: {new}. Decide in "
        f"{CODE}arguments.py: refuse_arguments whether each is honoured or refused."
    )
