"""The command line: `zeroamp check`, `explain`, `plan`, `report` and `profile`.

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

import zeroamp
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
    messages_to_stderr,
    read_config,
)
from zeroamp.cli.plan import plan
from zeroamp.cli.planned import axis_sizes, ledger_of, plan_of
from zeroamp.meshes.refused_meshes import refuse_sizes
from zeroamp.module_dtypes.extension import overridden
from zeroamp.planning.plan import Plan
from zeroamp.policies.errors import some_of
from zeroamp.reporting import saved_runs
from zeroamp.reporting.page import check_page, html_page, write_page
from zeroamp.reporting.profiling import Profile
from zeroamp.reporting.tables import paragraph

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
    config: Annotated[
        Path | None, typer.Argument(help="The config, a JSON file. It may be left out with --all.", show_default=False)
    ] = None,
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
    if config is None and not all_keys:
        raise typer.BadParameter("it is missing. Name a JSON file, or list all keys with --all.", param_hint="config")
    if model is None and (auto_wrap or inputs):
        raise typer.BadParameter("it needs a model. Name one with --model.", param_hint="--auto-wrap, --inputs")
    with messages_to_stderr(verbose):
        policy = zeroamp.policy_from_config({}) if config is None else read_config(config, auto, world_size)
        plan = None if model is None else plan_of(model, policy, auto_wrap, inputs)
        typer.echo(
            policy.report(defaults=all_keys) if config is None else f"{config}\n{policy.report(defaults=all_keys)}"
        )
        if not all_keys:
            typer.echo("--all lists all other keys with their defaults.")
        if plan is None:
            typer.echo("--model also checks the names of modules and classes.")
        else:
            typer.echo(f"\n{model}: {_describe(plan)}")


def _describe(plan: Plan) -> str:
    """Return lines about units and groups, and what each override applies to."""
    low = plan.describe_low_share()
    lines = [f"{len(plan.units)} units below the root, {len(plan.groups)} groups{f', {low}' if low else ''}"]
    for index, asked in enumerate(plan.policy.overrides):
        params = overridden(plan, index)
        names = f": {some_of([param.fqn for param in params], 4)}" if params else ""
        count = f"{len(params)} parameter{'' if len(params) == 1 else 's'}"
        lines.append(f"zeroamp.overrides.{index}: {asked.settings()} for {count}{names}")
    return paragraph("\n".join(lines))


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
    with messages_to_stderr(verbose):
        sizes = axis_sizes(mesh, world_size)
        policy = read_config(config, auto, world_size if sizes is None else sizes.num_data)
        if page is not None:
            check_page(page)
        if sizes is not None:
            refuse_sizes(policy, is_plain=not sizes.distributes_parameters, num_context=sizes.context)
        ledger = ledger_of(model, policy, auto_wrap, inputs, world_size=world_size, sizes=sizes)
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
