"""The command line: `zeroamp check`, `explain`, `plan`, `export`, `report` and `profile`.

Needs typer (the extra `cli`), so nothing else imports this file. Data goes to stdout, all else to stderr. Exit codes:
0, 1 for a mistake in config or model, 2 for a mistake in the arguments.
"""

import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

import zeroamp
from zeroamp.cli.model_source import check_source, takes_mesh
from zeroamp.cli.options import (
    MESH_HELP,
    Auto,
    AutoWrap,
    ConfigPath,
    Html,
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
from zeroamp.cli.planned import describe_plan, ledger_of, ledger_on_axes, plan_of
from zeroamp.meshes.refused_meshes import refuse_sizes
from zeroamp.policies.errors import some_of
from zeroamp.policies.policy import Policy, policy_from_config
from zeroamp.policies.safe_modules import resolve_safe_classes
from zeroamp.reporting import saved_runs
from zeroamp.reporting.page import check_page, html_page, write_page
from zeroamp.reporting.profiling import Profile

app = typer.Typer(
    help="Show what a DeepSpeed-style config does and which dtypes a model gets, without a GPU, weights or ranks. "
    "Plan, profile and compare training runs.",
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
    auto: Auto = None,
    auto_wrap: AutoWrap = None,
    inputs: Inputs = None,
    all_keys: Annotated[bool, typer.Option("--all", help="Also list the defaults of all other keys.")] = False,
    verbose: Verbosity = 0,
) -> None:
    """Print how every key of a config is used, or what is wrong with it."""
    if auto_wrap and model is None:
        raise typer.BadParameter("it needs a model. Name one with --model.", param_hint="--auto-wrap")
    if inputs and model is None:
        raise typer.BadParameter("it needs a model. Name one with --model.", param_hint="--inputs")
    values = auto_values(auto or [])
    with messages_to_stderr(verbose):
        policy = policy_from_config(config, world_size=world_size, **values)
        if model is not None:
            check_source(model)
        plan = None if model is None else plan_of(model, policy, auto_wrap, inputs)
        unchecked = [] if plan is not None else _names_for_the_model(policy)
        typer.echo(policy.report(defaults=all_keys))
        if not all_keys:
            typer.echo("--all lists all other keys with their defaults.")
        if unchecked:
            typer.echo(f"Names of modules and classes that only --model checks: {some_of(unchecked)}.")
        if model is not None and plan is not None:
            typer.echo(f"\n{describe_plan(model, plan)}")


def _names_for_the_model(policy: Policy) -> list[str]:
    """Return the names in the config that are looked up in the model.

    Raises:
        ConfigError: a class of torch does not exist.
    """
    safe, fp32, leaves = policy.lower_precision_safe_modules, policy.keep_in_fp32_modules, policy.leaf_modules
    names = [
        *([] if safe == "auto" else _of_the_model(safe)),
        *(() if fp32 == "auto" else fp32),
        *(name for override in policy.overrides for name in override.modules),
        *(*leaves.classes, *leaves.names, *leaves.name_suffixes),
    ]
    return list(dict.fromkeys(names))


def _of_the_model(names: Sequence[str]) -> list[str]:
    """Check the names of classes in torch and in imported modules. Return the others: they need the model's modules.

    Imports nothing but torch, because an import may run any code.
    """
    others = []
    for name in names:
        module_name = name.rpartition(".")[0]
        if module_name.partition(".")[0] == "torch" or module_name in sys.modules:
            resolve_safe_classes([name], nn.Module())
        elif module_name or not hasattr(nn, name):
            others.append(name)
    return others


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
    page: Html = None,
    world_size: WorldSize = None,
    mesh: Annotated[str | None, typer.Option(metavar="AXES", help=MESH_HELP)] = None,
    auto: Auto = None,
    auto_wrap: AutoWrap = None,
    inputs: Inputs = None,
    verbose: Verbosity = 0,
) -> None:
    """Print the dtype ledger: the dtypes of every parameter, and the bytes of an optimizer step.

    The model is built on the meta device. Bytes per rank need --world-size or --mesh. With a tensor or
    expert axis, they also need a factory with an argument mesh, which distributes the parameters.
    """
    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown exclude each other. Pass one of them.", param_hint="--json")
    values = auto_values(auto or [])
    with messages_to_stderr(verbose):
        sizes = mesh_sizes(mesh, world_size)
        policy = policy_from_config(config, world_size=world_size if sizes is None else sizes.num_data, **values)
        check_source(model)
        if page is not None:
            check_page(page)
        if sizes is not None:
            refuse_sizes(policy, is_plain=not sizes.distributes_parameters, num_context=sizes.context)
        if sizes is not None and sizes.distributes_parameters and takes_mesh(model):
            ledger = ledger_on_axes(model, policy, auto_wrap, inputs, sizes)
        else:
            ledger = ledger_of(plan_of(model, policy, auto_wrap, inputs), world_size, sizes)
        if page is not None:
            write_page(page, html_page("ledger", f"dtype ledger of {model}", ledger.title(), ledger.to_dict()))
            typer.echo(f"wrote {page}", err=True)
        if as_json:
            typer.echo(json.dumps(ledger.to_dict(), indent=2, allow_nan=False))
        elif as_markdown:
            typer.echo(ledger.to_markdown(per_parameter=per_parameter))
        else:
            typer.echo(ledger)
            if per_parameter:
                typer.echo(f"\n{ledger.per_parameter()}")


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a folder of checkpoints: the newest.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write to.", show_default=False)],
    *,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of parameters: fp32, bf16 or fp16. Default: by the run's config.")
    ] = None,
    max_shard_gb: Annotated[
        float, typer.Option("--max-shard-gb", min=1e-6, help="Most 10^9 bytes per file; bounds the memory needed.")
    ] = 5.0,
    verbose: Verbosity = 0,
) -> None:
    """Write the weights of a checkpoint as safetensors for transformers: one process, no model, no GPU."""
    with messages_to_stderr(verbose):
        taken = zeroamp.export_checkpoint(checkpoint, out, dtype, max_shard_bytes=int(max_shard_gb * 1e9))
        typer.echo(f"{taken} -> {out}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.jsonl...", help="Files of RunReport.", show_default=False)],
    *,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: the table, and every record.")] = False,
    page: Html = None,
) -> None:
    """Print a table that compares one or several runs, finished or not."""
    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown exclude each other. Pass one of them.", param_hint="--json")
    with messages_to_stderr(0):
        if page is not None:
            check_page(page)
        found = [saved_runs.read_run(path) for path in runs]
        data = saved_runs.runs_to_dict(found)
        if as_json:
            typer.echo(json.dumps(data, indent=2, allow_nan=False))
        else:
            typer.echo(saved_runs.table(found, "github" if as_markdown else "simple"))
        if page is not None:
            title = ", ".join(run["name"] for run in data["runs"])
            write_page(page, html_page("runs", title, "Runs as RunReport recorded them, on their first rank.", data))
            typer.echo(f"wrote {page}", err=True)


# Arguments after the script's name belong to the script.
@app.command(context_settings={"allow_interspersed_args": False})
def profile(
    script: Annotated[
        Path, typer.Argument(help="The training script.", exists=True, dir_okay=False, show_default=False)
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder for the traces, one per rank.")] = Path("traces"),
    wait: Annotated[int, typer.Option("--wait", min=0, help="Optimizer steps before profiling.")] = 1,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Profiled steps to discard.")] = 1,
    active: Annotated[int, typer.Option("--active", min=1, help="Steps to record.")] = 3,
    compress: Annotated[bool, typer.Option("--gz", help="Write rank0.json.gz.")] = False,
) -> None:
    """Run a training script, and profile some optimizer steps of its first TrainStep.

    torchrun --nproc-per-node 2 -m zeroamp profile --out traces train.py --lr 1e-4

    The script runs to its end. The first rank prints its labels with their times.
    """
    recording = Profile(None, out, wait=wait, warmup=warmup, active=active, compress=compress)
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
