"""Upgrade guard: what `zeroamp.integrations.lightning` stands on and Lightning does not promise."""

import inspect

import pytest

pytest.importorskip("lightning")


def _cases():
    from lightning.fabric import fabric, wrappers
    from lightning.fabric.plugins.precision import amp as fabric_amp
    from lightning.fabric.strategies import ddp as fabric_ddp
    from lightning.fabric.strategies import strategy as fabric_strategy
    from lightning.pytorch.callbacks import model_checkpoint
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loops import utilities
    from lightning.pytorch.plugins.precision import Precision, amp
    from lightning.pytorch.strategies import strategy
    from lightning.pytorch.trainer import trainer
    from lightning.pytorch.trainer.connectors import accelerator_connector, checkpoint_connector

    connector = checkpoint_connector._CheckpointConnector
    return {
        "Fabric reads its precision from the strategy (fabric.py: ZeroampStrategy.precision)": (
            fabric.Fabric.__init__,
            "self._precision: Precision = self._strategy.precision",
        ),
        "_FabricModule redirects methods if the forward module is not the model (strategy.py: ForwardModule)": (
            wrappers._FabricModule.__getattr__,
            "self._forward_module != self._original_module",
        ),
        "_FabricOptimizer is a subclass of the optimizer's class (strategy.py: view_of)": (
            wrappers._FabricOptimizer.__init__,
            "(self.__class__, optimizer.__class__)",
        ),
        "Fabric's mixed precision casts inputs and outputs (fabric.py: _ZeroampPrecision)": (
            fabric_amp.MixedPrecision.convert_output,
            "dst_type=torch.get_default_dtype()",
        ),
        "no_backward_sync asks strategy._backward_sync_control (fabric.py: _SyncControl)": (
            fabric.Fabric.no_backward_sync,
            "self._strategy._backward_sync_control.no_backward_sync(forward_module, enabled)",
        ),
        "Fabric's strategies check the keys of a strict load (fabric.py: load_checkpoint)": (
            fabric_strategy._validate_keys_for_strict_loading,
            "raise KeyError",
        ),
        "Fabric's DDPStrategy starts processes by start_method (strategy.py: _STARTING)": (
            fabric_ddp.DDPStrategy._configure_launcher,
            "self._start_method",
        ),
        "LightningOptimizer is a subclass of the optimizer's class (strategy.py: view_of)": (
            LightningOptimizer.__init__,
            "(self.__class__, optimizer.__class__)",
        ),
        "The Trainer blocks synchronisation of accumulated batches by block_backward_sync (trainer.py)": (
            utilities._block_parallel_sync_behavior,
            "strategy.block_backward_sync()",
        ),
        "Hooks and clipping run in Precision._after_closure (trainer.py: optimizer_step)": (
            Precision._after_closure,
            "self._clip_gradients(",
        ),
        "GradScaler of 16-mixed has torch's defaults (strategy.py: _LOSS_SCALE)": (
            amp.MixedPrecision.__init__,
            "torch.amp.GradScaler(device=device)",
        ),
        "Steps are redirected through strategy.model (trainer.py: training_step)": (
            strategy.Strategy.training_step,
            "self._forward_redirection(self.model, self.lightning_module",
        ),
        "The connector sets strategy._layer_sync for sync_batchnorm (trainer.py)": (
            accelerator_connector._AcceleratorConnector._lazy_init_strategy,
            "self.strategy._layer_sync = self._layer_sync",
        ),
        "The Trainer's precision plugin is the strategy's (trainer.py: precision_plugin)": (
            trainer.Trainer.precision_plugin.fget,
            "self.strategy.precision_plugin",
        ),
        "A checkpoint's optimizer states are left out for weights_only (trainer.py: save_checkpoint)": (
            connector.dump_checkpoint,
            'checkpoint["optimizer_states"] = optimizer_states',
        ),
        "A ModelCheckpoint does not save a step twice (trainer.py: _note_saved)": (
            model_checkpoint.ModelCheckpoint._should_skip_saving_checkpoint,
            "self._last_global_step_saved == trainer.global_step",
        ),
        "A checkpoint is loaded after the set-up (trainer.py: restore_checkpoint_after_setup)": (
            trainer.Trainer._run,
            "if self.strategy.restore_checkpoint_after_setup:",
        ),
    }


def test_lightning_is_as_the_strategies_take_it_to_be():
    gone = [name for name, (function, text) in _cases().items() if text not in inspect.getsource(function)]
    assert gone == [], f"no longer so, look at the code in parentheses: {gone}"
