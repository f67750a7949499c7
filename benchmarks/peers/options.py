"""The options of a measurement: the command line of `step_time` and `step_memory`."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.model import SHAPES


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of a measurement, the same for every engine."""

    model: str = "3.7m"
    batch: int = 4
    """Sequences per rank and micro-batch."""
    length: int = 128
    """Tokens of a sequence."""
    micro_batches: int = 1
    """Per optimizer step."""
    clip: float = 0.0
    """Largest norm of the gradients; 0: not clipped."""
    checkpointing: bool = False
    compile: bool = False
    rounds: int = 50
    warm_up: int = 5
    """Rounds before the measured ones."""
    engines: tuple[str, ...] = ()
    """Names of engines. Empty: all."""
    bases: tuple[str, ...] = ()
    """Engines that the others are divided by. Empty: the FSDP2 ones."""
    fake: bool = False
    """Whether collectives move nothing: one process is one rank of `world_size`."""
    world_size: int = 8
    """Ranks with `fake`. Otherwise the launcher sets the number."""
    out: Path | None = None
    """Folder of the record. None: only printed."""

    @classmethod
    def from_command_line(cls, description: str | None, **usual_fields: Any) -> Self:
        """Parse the process's arguments. `usual_fields`: other defaults than those of the class."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        usual = cls(**usual_fields)
        parser.add_argument("--model", choices=SHAPES, default=usual.model)
        parser.add_argument("--batch", type=int, default=usual.batch, help="sequences per rank and micro-batch")
        parser.add_argument("--length", type=int, default=usual.length, help="tokens of a sequence")
        parser.add_argument("--micro-batches", type=int, default=usual.micro_batches, help="per optimizer step")
        parser.add_argument("--clip", type=float, default=usual.clip, help="largest norm of the gradients; 0: off")
        parser.add_argument("--checkpointing", action="store_true", help="recompute every block in the backward")
        parser.add_argument("--compile", action="store_true", help="torch.compile every block")
        parser.add_argument("--rounds", type=int, default=usual.rounds)
        parser.add_argument("--warm-up", type=int, default=usual.warm_up, help="rounds before the measured ones")
        parser.add_argument("--engines", type=_names, default=(), help="comma-separated; default: all")
        parser.add_argument("--bases", type=_names, default=(), help="engines to divide by; default: FSDP2's")
        parser.add_argument(
            "--fake", action="store_true", help="one process, one rank of many; collectives move nothing"
        )
        parser.add_argument("--world-size", type=int, default=usual.world_size, help="ranks, with --fake")
        parser.add_argument("--out", type=Path, default=None, help="folder to write the record into")
        return cls(**vars(parser.parse_args()))

    def described(self) -> str:
        """Return the options in words."""
        left_out = {"engines", "bases", "out", "fake", "world_size"}
        return ", ".join(
            f"{field.name.replace('_', ' ')} {getattr(self, field.name)}"
            for field in fields(self)
            if field.name not in left_out
        )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
