"""Run finetune_llama.py's function under Ray Train, with checkpoints and restarts by Ray.

    python examples/launch/ray_train.py --workers 16 --storage FOLDER --name finetune \\
        --train-batch-size 256 --micro-batch-size 4 --steps 1000 --save-every 50

All other options go to finetune_llama.py. FOLDER is on a file system that all hosts mount: the ranks write the shards
of a checkpoint into it themselves, and report each checkpoint to Ray. If a worker is lost, Ray restarts all of them
from the newest reported checkpoint. So does this command when it is run again with the same --name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch

MAX_FAILURES = 20
EXAMPLES = Path(__file__).resolve().parents[1]


def main(arguments: list[str] | None = None) -> ray.train.Result:
    """Read the command line, train on Ray's workers, and return Ray's result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="ranks, one for each GPU")
    parser.add_argument("--storage", type=Path, required=True, help="a folder that all hosts mount")
    parser.add_argument("--name", default="finetune", help="name of the run, a folder in --storage")
    parser.add_argument("--cpu", action="store_true", help="train on CPUs")
    parser.add_argument("--keep", type=int, default=2, help="how many checkpoints to keep")
    parser.add_argument("--timeout", type=int, default=300, help="seconds until a rank that waits for another fails")
    asked, options = parser.parse_known_args(arguments)
    trainer = ray.train.torch.TorchTrainer(
        train_rank,
        train_loop_config={"examples": str(EXAMPLES), "options": options},
        scaling_config=ray.train.ScalingConfig(num_workers=asked.workers, use_gpu=not asked.cpu),
        # gloo beside NCCL, for tensors on the CPU.
        torch_config=ray.train.torch.TorchConfig(
            backend="gloo" if asked.cpu else "cpu:gloo,cuda:nccl", timeout_s=asked.timeout
        ),
        run_config=ray.train.RunConfig(
            name=asked.name,
            storage_path=str(asked.storage.resolve()),
            failure_config=ray.train.FailureConfig(max_failures=MAX_FAILURES),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=asked.keep),
        ),
    )
    return trainer.fit()


def train_rank(config: dict[str, Any]) -> None:
    """Train one rank, from Ray's newest checkpoint. Ray has made the process group."""
    sys.path.insert(0, config["examples"])
    from finetune_llama import finetune, parse_arguments

    args = parse_arguments(config["options"])
    newest = ray.train.get_checkpoint()
    args.out = Path(ray.train.get_context().get_storage().experiment_fs_path)
    args.resume = None if newest is None else newest.path
    args.keep = None  # Ray removes the old ones
    finetune(args, ray.train.torch.get_device(), on_save=report)


def report(path: Path, run: Any) -> None:
    """Report a checkpoint to Ray. It is already in the folder that Ray would copy it to."""
    ray.train.report(
        {"step": len(run.losses), "loss": run.losses[-1]},
        checkpoint=ray.train.Checkpoint.from_directory(str(path)),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


if __name__ == "__main__":
    main()
