"""The command line: `zeroamp check`, `explain`, `plan`, `export`, `report` and `profile`.

Needs typer (the extra `cli`), so nothing else imports this file. Data goes to stdout, all else to stderr. Exit codes:
0, 1 for a mistake in config or model, 2 for a mistake in the arguments.
"""

import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import torch
import typer

import zeroamp
from zeroamp.checkpoint.export import export_checkpoint
from zeroamp.cli.model_source import load_inputs, load_model
from zeroamp.cli.options import (
    MESH_HELP,
    Auto,
    AutoWrap,
    ConfigPath,
    GpusPerNode,
    Inputs,
    Model,
    OptionalModel,
    Verbosity,
    WorldSize,
    auto_values,
    mesh_sizes,
    messages_to_stderr,
)
from zeroamp.cli.plan import plan
from zeroamp.ledger.explain import Ledger
from zeroamp.planning.mesh import Ranks, mesh_shape
from zeroamp.planning.mesh_axes import AxisSizes
from zeroamp.planning.mesh_notes import mesh_notes
from zeroamp.planning.nodes import ranks_per_node
from zeroamp.planning.plan import Plan, build_plan
from zeroamp.policies import Policy, policy_from_config
from zeroamp.policies.errors import some_of
from zeroamp.reporting import saved_runs
from zeroamp.reporting.profiling import Profile

TRACED_TOKENS = 2048
"""Sequence length of the inputs of a traced run, as `zeroamp plan` has it by default. The batch is 1."""

app = typer.Typer(
    help="What a DeepSpeed-style config does, and which dtype it puts where: without a GPU, weights or ranks. And "
    "where the time of a training script goes.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"zeroamp {zeroamp.__version__}")
        raise typer.Exit


app.command()(plan)


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def check(
    config: ConfigPath,
    *,
    model: OptionalModel = None,
    world_size: WorldSize = None,
    gpus_per_node: GpusPerNode = 8,
    auto: Auto = None,
    auto_wrap: AutoWrap = None,
    inputs: Inputs = None,
    verbose: Verbosity = 0,
) -> None:
    """Print what becomes of every key of a config, or what is wrong.

    With --model and --world-size, also print what is slow on that many ranks: padding, long rings,
    flat all-to-alls between nodes.
    """
    if auto_wrap and model is None:
        raise typer.BadParameter("units are those of a model: name it with --model.", param_hint="--auto-wrap")
    if inputs and model is None:
        raise typer.BadParameter("inputs are those of a model: name it with --model.", param_hint="--inputs")
    values = auto_values(auto or [])
    with messages_to_stderr(verbose):
        policy = policy_from_config(config, world_size=world_size, **values)
        plan = None if model is None else _plan(model, policy, auto_wrap, inputs)
        typer.echo(policy.report())
        if plan is not None:
            low = f", {text}" if (text := plan.describe_low_share()) else ""
            typer.echo(f"{model}: {len(plan.units)} units below the root, {len(plan.groups)} groups{low}")
            for line in _override_lines(plan):
                typer.echo(line)
            per_node = gpus_per_node if policy.ranks_per_node == "auto" else ranks_per_node(policy)
            if world_size is not None and (notes := mesh_notes(plan, _ranks(policy, world_size), per_node)):
                typer.echo(notes)


def _override_lines(plan: Plan) -> Iterator[str]:
    """Yield what each override sets, and for which parameters of the model."""
    for index, asked in enumerate(plan.policy.overrides):
        params = plan.overridden(index)
        names = f": {some_of([param.fqn for param in params], 4)}" if params else ""
        count = f"{len(params)} parameter{'' if len(params) == 1 else 's'}"
        yield f"zeroamp.overrides.{index}: {asked.settings()} for {count}{names}"


@app.command()
def explain(
    config: ConfigPath,
    *,
    model: Model,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object: config, units, summary, groups, parameters.")
    ] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="The same tables as Markdown.")] = False,
    per_parameter: Annotated[
        bool, typer.Option("--per-parameter", help="Also one row per parameter (--json has them always).")
    ] = False,
    world_size: WorldSize = None,
    mesh: Annotated[str | None, typer.Option(metavar="AXES", help=MESH_HELP)] = None,
    auto: Auto = None,
    auto_wrap: AutoWrap = None,
    inputs: Inputs = None,
    verbose: Verbosity = 0,
) -> None:
    """Print the dtype ledger: which dtype a model gets where, and the bytes of an optimizer step.

    The model is built on the meta device. Bytes per rank need --world-size or --mesh. With a tensor or
    expert axis they are not known here: which parameters are distributed is up to the training script.
    """
    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown are two forms of one output: name one.", param_hint="--json")
    values = auto_values(auto or [])
    with messages_to_stderr(verbose):
        sizes = mesh_sizes(mesh, world_size)
        policy = policy_from_config(config, world_size=world_size if sizes is None else sizes.num_data, **values)
        ledger = _ledger(_plan(model, policy, auto_wrap, inputs), world_size, sizes)
        if as_json:
            typer.echo(json.dumps(ledger.to_dict(), indent=2, allow_nan=False))
        elif as_markdown:
            typer.echo(ledger.to_markdown(per_parameter=per_parameter))
        else:
            typer.echo(ledger)
            if per_parameter:
                typer.echo(f"\n{ledger.per_parameter()}")


def _plan(source: str, policy: Policy, auto_wrap: list[str] | None, inputs: str | None) -> Plan:
    with redirect_stdout(sys.stderr):  # a factory may print, and stdout may be parsed
        model, example_inputs = load_model(source), None
        if inputs is not None:
            make = load_inputs(inputs)
            with torch.device("meta"):
                example_inputs = make(1, TRACED_TOKENS)
        return build_plan(model, policy, auto_wrap, example_inputs)


def _ledger(plan: Plan, world_size: int | None, sizes: AxisSizes | None) -> Ledger:
    if sizes is not None:
        if sizes.tensor > 1 or sizes.expert > 1:
            return Ledger(plan=plan)
        if plan.policy.stage == 0:
            return Ledger(plan=plan, num_shards=1, num_replicas=sizes.replicate * sizes.num_shards)
        replicas = sizes.replicate if sizes.replicate > 1 else None
        return Ledger(plan=plan, num_shards=sizes.num_shards, num_replicas=replicas)
    if world_size is None:
        return Ledger(plan=plan)
    ranks = _ranks(plan.policy, world_size)
    return Ledger(plan=plan, num_shards=ranks.num_shards, num_replicas=ranks.num_replicas)


def _ranks(policy: Policy, world_size: int) -> Ranks:
    *replicas, num_shards = mesh_shape(policy.stage, world_size, policy.dp_replicate_size)
    return Ranks(num_shards=num_shards, num_replicas=replicas[0] if replicas else None)


@app.command()
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
        taken = export_checkpoint(checkpoint, out, dtype, max_shard_bytes=int(max_shard_gb * 1e9))
        typer.echo(f"{taken} -> {out}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.jsonl...", help="Files of RunReport.", show_default=False)],
    *,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw loss, norm, tokens/s and memory.")
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
) -> None:
    """Print a table of one or several runs, side by side, also of those that still go on."""
    with messages_to_stderr(0):
        read = [saved_runs.read_run(path) for path in runs]
        typer.echo(saved_runs.table(read, "github" if as_markdown else "simple"))
        if picture is not None:
            saved_runs.plot(read, picture)
            typer.echo(f"wrote {picture}", err=True)


# What follows the script is the script's own.
@app.command(context_settings={"allow_interspersed_args": False})
def profile(
    script: Annotated[
        Path, typer.Argument(help="The training script.", exists=True, dir_okay=False, show_default=False)
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder for the traces, one per rank.")] = Path("traces"),
    wait: Annotated[int, typer.Option("--wait", min=0, help="Optimizer steps to let pass first.")] = 1,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Steps to warm the profiler up.")] = 1,
    active: Annotated[int, typer.Option("--active", min=1, help="Steps to record.")] = 3,
    compress: Annotated[bool, typer.Option("--gz", help="Write rank0.json.gz.")] = False,
) -> None:
    """Run a training script, and write a trace of some optimizer steps of its first TrainStep.

    torchrun --nproc-per-node 2 -m zeroamp profile --out traces train.py --lr 1e-4

    The script runs to its end. The first rank prints its ranges with their times.
    """
    recording = Profile(out, wait=wait, warmup=warmup, active=active, compress=compress)
    with recording, _as_main(script, arguments or []):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
    if recording.rank == 0:
        typer.echo(f"{recording}\n\n{recording.path}")


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as `python script.py` does."""
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before
