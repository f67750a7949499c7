"""The command line: what a config asks for, and what it does to a model, before anything runs; and a profiled run.

Needs typer (the extra `cli`), so nothing else imports this file. Data goes to stdout, all else to stderr. Exit codes:
0, 1 for a mistake in config or model, 2 for a mistake in the arguments.
"""

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

import zeroamp
from zeroamp.cli.export import export
from zeroamp.cli.model_source import load_model
from zeroamp.cli.options import (
    Auto,
    AutoWrap,
    ConfigPath,
    Model,
    OptionalModel,
    Verbosity,
    WorldSize,
    auto_values,
    messages_to_stderr,
)
from zeroamp.cli.plan import plan
from zeroamp.cli.profile import profile
from zeroamp.cli.report import report
from zeroamp.ledger.ledger import Ledger
from zeroamp.planning.mesh import mesh_shape
from zeroamp.planning.plan import Plan, build_plan
from zeroamp.policies import Policy, policy_from_config

app = typer.Typer(
    help="What a DeepSpeed-style config asks for, and which dtype it puts where: without a GPU, weights or ranks. And "
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
    auto: Auto = None,
    auto_wrap: AutoWrap = None,
    verbose: Verbosity = 0,
) -> None:
    """Say what becomes of every key of a config, or what is wrong."""
    if auto_wrap and model is None:
        raise typer.BadParameter("units are those of a model: name it with --model.", param_hint="--auto-wrap")
    values = auto_values(auto or [])
    with messages_to_stderr(verbose):
        policy = policy_from_config(config, world_size=world_size, **values)
        plan = None if model is None else _plan(model, policy, auto_wrap)
        typer.echo(policy.report())
        if plan is not None:
            typer.echo(f"{model}: {len(plan.units)} units below the root, {len(plan.groups)} groups")


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
    auto: Auto = None,
    auto_wrap: AutoWrap = None,
    verbose: Verbosity = 0,
) -> None:
    """Print the dtype ledger: which dtype a model gets where, and the bytes of an optimizer step.

    The model is built on the meta device. Bytes per rank need --world-size.
    """
    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown are two forms of one output: name one.", param_hint="--json")
    values = auto_values(auto or [])
    with messages_to_stderr(verbose):
        policy = policy_from_config(config, world_size=world_size, **values)
        ledger = _ledger(_plan(model, policy, auto_wrap), world_size)
        if as_json:
            typer.echo(json.dumps(ledger.to_dict(), indent=2, allow_nan=False))
        elif as_markdown:
            typer.echo(ledger.to_markdown(per_parameter=per_parameter))
        else:
            typer.echo(ledger)
            if per_parameter:
                typer.echo(f"\n{ledger.per_parameter()}")


app.command()(export)
app.command()(report)
# What follows the script is the script's own.
app.command(context_settings={"allow_interspersed_args": False})(profile)


def _plan(source: str, policy: Policy, auto_wrap: list[str] | None) -> Plan:
    with redirect_stdout(sys.stderr):  # a factory may print, and stdout may be parsed
        return build_plan(load_model(source), policy, auto_wrap)


def _ledger(plan: Plan, world_size: int | None) -> Ledger:
    if world_size is None:
        return Ledger(plan=plan)
    *replicas, num_shards = mesh_shape(plan.policy.stage, world_size, plan.policy.dp_replicate_size)
    return Ledger(plan=plan, num_shards=num_shards, num_replicas=replicas[0] if replicas else None)
