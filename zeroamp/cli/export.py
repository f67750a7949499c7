"""`zeroamp export`: a checkpoint as safetensors."""

from pathlib import Path
from typing import Annotated

import typer

from zeroamp.checkpoint.export import export_checkpoint
from zeroamp.cli.options import Verbosity, messages_to_stderr

GB = 1000**3


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="What save_checkpoint wrote, or a folder of such: the newest.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write to.", show_default=False)],
    *,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="fp32, bf16 or fp16, of parameters; default: by the run's config.")
    ] = None,
    max_shard_gb: Annotated[
        float, typer.Option("--max-shard-gb", min=1e-6, help="Size of a file, 10^9 bytes; bounds the memory needed.")
    ] = 5.0,
    verbose: Verbosity = 0,
) -> None:
    """Write the weights of a checkpoint as safetensors that transformers reads; one process, no model, no GPU."""
    with messages_to_stderr(verbose):
        taken = export_checkpoint(checkpoint, out, dtype, max_shard_bytes=int(max_shard_gb * GB))
        typer.echo(f"{taken} -> {out}")
