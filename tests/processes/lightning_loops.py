"""What every rank runs in the tests of Lightning: its own loops, on one model, with DDP and with zeroamp."""

import dataclasses
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

WIDTH, CLASSES = 8, 4


def _environment():
    """Return Lightning's description of processes that run already: nothing is launched."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Running(LightningEnvironment):
        creates_processes_externally = True

        def global_rank(self):
            return dist.get_rank()

        def local_rank(self):
            return dist.get_rank()

        def world_size(self):
            return dist.get_world_size()

        def teardown(self):
            pass

    return Running()


class Net(nn.Module):
    """Linears, which autocast casts, and norms, which it does not."""

    def __init__(self, dropout):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(dropout)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = inputs + layer(inputs)
        return self.head(inputs)


def trainer_of(folder, strategy, precision=None, **more):
    from lightning.pytorch import Trainer

    import zeroamp.integrations.lightning  # noqa: F401 - registers the names

    arguments = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "plugins": [_environment()],
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": 1,
        **more,
    }
    with lightning_warnings():
        return Trainer(strategy=strategy, precision=precision, **arguments)


@contextmanager
def lightning_warnings():
    """Ignore what Lightning warns of in a tiny run: few workers, few batches, a name that torch deprecates."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
        warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
        warnings.filterwarnings("ignore", message="You requested to overfit")
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield


def module_of(*, is_meta=False, dropout=0.1, epoch_schedule=False, **hooks):
    """Return a LightningModule around `Net` that records losses and learning rates."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.losses, self.rates = [], []
            if not is_meta:
                self.net = Net(dropout=dropout)

        def configure_model(self):
            if is_meta and not hasattr(self, "net"):
                with torch.device("meta"):
                    self.net = Net(dropout=dropout)

        def forward(self, inputs):
            return self.net(inputs)

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            if not self.trainer.barebones:
                self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch, index):
            if not self.trainer.barebones:
                self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch, index):
            return self(batch[0]).float()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 if epoch_schedule else 2, 0.5)
            interval = "epoch" if epoch_schedule else "step"
            return [optimizer], [{"scheduler": scheduler, "interval": interval}]

    for name, hook in hooks.items():
        setattr(Module, name, hook)
    return Module()


def loader_of(size=24):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(size, WIDTH, generator=generator)
    labels = torch.randint(0, CLASSES, (size,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=2)


def fit(module, folder, strategy, precision=None, *, ckpt_path=None, **arguments):
    """Fit a LightningModule with validation, and return the Trainer."""
    trainer = trainer_of(folder, strategy, precision, **arguments)
    torch.manual_seed(10 + dist.get_rank())
    with lightning_warnings():
        trainer.fit(module, loader_of(), loader_of(8), ckpt_path=ckpt_path)
    return trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """What a fit did on this rank, and the predictions after it."""

    losses: list[float]
    rates: list[float]
    predictions: torch.Tensor
    metrics: dict[str, float]


def fitted(folder, strategy, precision=None, **arguments):
    """Build, fit and predict."""
    torch.manual_seed(0)
    module = module_of()
    trainer = fit(module, folder, strategy, precision, **arguments)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    with lightning_warnings():
        predictions = torch.cat(trainer.predict(module, loader_of(8)))
    return Fitted(losses=module.losses, rates=module.rates, predictions=predictions, metrics=metrics)
