"""What zeroamp.integrations.transformers assumes about transformers, private or by position, one by one.

If one fails after an upgrade: its text says what no longer holds, and which code stands on it.
"""

import inspect
import re

import pytest

transformers = pytest.importorskip("transformers", reason="the assumptions are about it")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")


def _source(name):
    from transformers import Trainer

    return inspect.getsource(getattr(Trainer, name))


def _calls(method, *texts):
    """Whether a method of Trainer has these texts in this order."""
    source = re.sub(r"\s+", " ", _source(method))
    place = 0
    for text in texts:
        place = source.find(text, place)
        if place < 0:
            return False
    return True


def _is_module_global():
    import transformers.trainer

    return "self.accelerator = Accelerator(**args)" in _source("create_accelerator_and_postprocess") and hasattr(
        transformers.trainer, "Accelerator"
    )


def _has_rules():
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    assert list(inspect.signature(rename_source_key).parameters)[:5] == [
        "source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict",
    ]  # fmt: skip
    has_patterns = {"source_patterns", "target_patterns"} <= set(inspect.signature(WeightConverter.__init__).parameters)
    return has_patterns and callable(dot_natural_key) and callable(get_model_conversion_mapping)


ASSUMPTIONS = {
    "Trainer takes `Accelerator` from the globals of its module; trainer.py replaces it": _is_module_global,
    "Trainer.__init__ moves the model by _move_model_to_device; trainer.py makes that do nothing": lambda: _calls(
        "__init__", "create_accelerator_and_postprocess()", "self._move_model_to_device(model, args.device)"
    ),
    "_prepare_for_training creates the optimizer, prepares both, creates the scheduler, then loads": lambda: _calls(
        "_prepare_for_training", "self.create_optimizer()", "self.accelerator.prepare(self.model, self.optimizer)",
        "self.create_scheduler(num_training_steps=max_steps)", "self._load_optimizer_and_scheduler",
    ),
    "train() calls _load_from_checkpoint before the model is wrapped; trainer.py only checks there": lambda: _calls(
        "train", "self._load_from_checkpoint(resume_from_checkpoint)", "inner_training_loop("
    ),
    "_run_epoch sets sync_gradients before training_step, then norm, callback, update, callback": lambda: _calls(
        "_run_epoch", "gradient_state._set_sync_gradients(do_sync_step)", "self.training_step(",
        "self._clip_grad_norm(", "on_pre_optimizer_step", "self.optimizer.step()", "on_optimizer_step",
        "optimizer_step_was_skipped",
    ),
    "_get_grad_norm passes infinity to clip_grad_norm_; accelerator.py makes it 0": lambda: _calls(
        "_get_grad_norm", 'self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))'
    ),
    "training_step ends in accelerator.backward(loss) of a loss that is divided already": lambda: _calls(
        "training_step", "loss / self.current_gradient_accumulation_steps", "self.accelerator.backward(loss, **kwargs)"
    ),
    "_inner_training_loop frees the accelerator first; accelerator.py keeps the old parameters": lambda: _calls(
        "_inner_training_loop", "self.accelerator.free_memory()", "self._prepare_for_training("
    ),
    "_save_checkpoint calls save_model, then _save_optimizer_and_scheduler on all ranks": lambda: _calls(
        "_save_checkpoint", "self.save_model(output_dir, _internal_call=True)", "self._save_optimizer_and_scheduler("
    ),
    "_build_accelerator_args passes mixed_precision and dynamo_plugin; trainer.py removes them": lambda: _calls(
        "_build_accelerator_args", '"mixed_precision"', '"dynamo_plugin"'
    ),
    "compute_loss chooses the smoothed loss by the model's _get_name(); trainer.py sets it": lambda: _calls(
        "compute_loss", "unwrapped_model._get_name()", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    ),
    "set_initial_training_values returns max_steps last; trainer.py reads it": lambda: _calls(
        "set_initial_training_values", "return (", "max_steps, )"
    ),
    "conversion_mapping has the rules for published files; weights/layouts.py applies them": _has_rules,
}  # fmt: skip


@pytest.mark.parametrize("text", list(ASSUMPTIONS))
def test_assumption(text):
    assert ASSUMPTIONS[text](), f"no longer so in transformers {transformers.__version__}: {text}"
