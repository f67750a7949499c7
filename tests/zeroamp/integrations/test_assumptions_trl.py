"""Upgrade guard: what `zeroamp.integrations.trl` and adapters of a Trainer stand on, and TRL or peft do not promise."""

import inspect

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")


def _cases():
    import peft
    from accelerate.utils import is_peft_model
    from trl import DPOTrainer, KTOTrainer, SFTTrainer
    from trl.trainer import utils

    return {
        "add_fused_lm_head replaces model.forward after Trainer.__init__ (transformers/trainer.py: wrap is late)": (
            SFTTrainer.__init__,
            "        add_fused_lm_head(",
        ),
        "the fused head is asked for by an argument of the model's call (trl.py: example_inputs)": (
            SFTTrainer.compute_loss,
            "model(**inputs, fused_lm_head=True)",
        ),
        "DPO calls the model that compute_loss is given, first (trl.py: _Recorder)": (
            DPOTrainer._compute_loss,
            "outputs = model(**model_kwargs, labels=labels, fused_lm_head=True)",
        ),
        "the fused head reads lm_head.weight outside of its module (trl.py: filled_config)": (
            utils.add_fused_lm_head,
            "weight, bias = lm_head.weight, lm_head.bias",
        ),
        "DPO prepares its reference model by the accelerator (trl.py: prepare_wrap)": (
            DPOTrainer.__init__,
            "self.ref_model = self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)",
        ),
        "KTO prepares its reference model by the accelerator (trl.py: prepare_wrap)": (
            KTOTrainer.__init__,
            "self.ref_model = self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)",
        ),
        "DPO computes reference log-probabilities of data sets by compute_ref_log_probs (trl.py)": (
            DPOTrainer._precompute_ref_logps,
            "self.compute_ref_log_probs(model, padded_batch)",
        ),
        "adapters are switched off in place, on the wrapped model (trl.py: no reference model with peft)": (
            utils.use_adapter,
            "with model.disable_adapter():",
        ),
        "accelerate knows a PeftModel by its class (transformers/trainer.py: _export)": (
            is_peft_model,
            "isinstance(extract_model_from_parallel(model), PeftModel)",
        ),
        "save_pretrained writes every adapter, all but default into folders (transformers/trainer.py: _export)": (
            peft.PeftModel.save_pretrained,
            'os.path.join(save_directory, adapter_name) if adapter_name != "default" else save_directory',
        ),
    }


def test_what_trl_and_peft_do():
    gone = [name for name, (function, text) in _cases().items() if text not in inspect.getsource(function)]
    assert not gone, "These assumptions no longer hold: " + "; ".join(gone)
