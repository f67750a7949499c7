"""The command `zeroamp plan`: predicts memory and traffic of a run."""

import json
import logging
import sys
from contextlib import ExitStack, redirect_stdout
from typing import Annotated

import typer

from zeroamp.cli.model_source import load_function, load_model
from zeroamp.cli.options import (
    MESH_HELP,
    Auto,
    AutoWrap,
    ConfigPath,
    Html,
    Inputs,
    Model,
    Verbosity,
    messages_to_stderr,
    read_config,
)
from zeroamp.cli.planned import AxisSizes, axis_sizes, model_on_axes
from zeroamp.dry_run.drawn_timeline import drawn_timeline
from zeroamp.dry_run.gpu_memory import GPUS_GB
from zeroamp.dry_run.render import title
from zeroamp.dry_run.run_plan import plan_run
from zeroamp.meshes.refused_meshes import refuse_sizes
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Stage
from zeroamp.reporting.page import check_page, html_page, write_page

_STAGES: dict[str, Stage] = {"0": 0, "1": 1, "2": 2, "3": 3}

logger = logging.getLogger("zeroamp")


def plan(
    config: ConfigPath,
    *,
    model: Model,
    world_size: Annotated[
        int | None, typer.Option("--world-size", metavar="N", min=1, help="Ranks of the run.")
    ] = None,
    mesh: Annotated[str | None, typer.Option(metavar="AXES", help=MESH_HELP)] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples per micro-batch and rank. Default: the config's.")
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 2048,
    stages: Annotated[str, typer.Option(metavar="LIST", help="ZeRO stages to compare.")] = ",".join(_STAGES),
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="Each unit recomputes its forward.")
    ] = False,
    gpu: Annotated[
        str, typer.Option(metavar="NAME|GB", help=f"One of {', '.join(GPUS_GB)}, or the memory of another GPU in GB.")
    ] = "h100",
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", min=1, help="GPUs of a node, for the memory of NCCL.")
    ] = 8,
    inputs: Inputs = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION",
            help="module:function or file.py:function of the model's output that returns the loss. "
            "Default: the output's .loss, or the output itself.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, in bytes.")] = False,
    page: Html = None,
    auto: Auto = None,
    auto_wrap: AutoWrap = None,
    verbose: Verbosity = 0,
) -> None:
    """Predict memory and traffic of an optimizer step at every ZeRO stage, without weights, GPUs or ranks."""
    chosen = _stages(stages)
    with messages_to_stderr(verbose):
        sizes = axis_sizes(mesh, world_size)
        shape = None if sizes is None else _shape(sizes, seq)
        if sizes is not None:
            world_size, seq = sizes.num_ranks, seq // sizes.context
        elif world_size is None:
            raise typer.BadParameter("the number of ranks is missing. Pass --world-size or --mesh dp=N.")
        policy = read_config(config, auto, world_size if sizes is None else sizes.num_data)
        if page is not None:
            check_page(page)
        if sizes is not None and not sizes.distributes_parameters:  # else plan_run leaves single stages out
            refuse_sizes(policy, is_plain=not sizes.distributes_parameters, num_context=sizes.context)
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(sys.stderr))  # a factory may print, and stdout may be parsed
            distributed = None
            if sizes is not None and sizes.distributes_parameters:
                distributed = stack.enter_context(model_on_axes(model, sizes))
            run = plan_run(
                load_model(model) if distributed is None else distributed[0],
                policy,
                world_size=world_size,
                mesh=shape if distributed is None else distributed[1],
                batch=batch,
                seq=seq,
                stages=chosen,
                checkpointing=checkpointing,
                gpu=float(gpu) if gpu.replace(".", "", 1).isdecimal() else gpu,
                gpus_per_node=gpus_per_node,
                inputs=None if inputs is None else load_function(inputs, "--inputs"),
                loss_fn=None if loss is None else load_function(loss, "--loss"),
                auto_wrap_policy=auto_wrap,
            )
        typer.echo(json.dumps(run.to_dict(), indent=2, allow_nan=False) if as_json else run)
        if page is not None:
            data = {"plan": run.to_dict(), "timelines": [drawn_timeline(stage) for stage in run.stages]}
            write_page(page, html_page("plan", f"plan of {model}", title(run), data))
            typer.echo(f"wrote {page}", err=True)


def _shape(sizes: AxisSizes, seq: int) -> tuple[int, int]:
    """Return replicas and shards. Refuse a sequence that the context ranks do not divide."""
    if seq % sizes.context:
        raise ConfigError(
            f"--seq {seq} must be a multiple of the {sizes.context} ranks of the context axis. Change one."
        )
    if sizes.context > 1 and not sizes.distributes_parameters:
        logger.warning(
            "The plan leaves out the attention's exchange over the %d ranks of the context axis.", sizes.context
        )
    return sizes.replicate, sizes.num_shards


def _stages(text: str) -> "tuple[Stage, ...]":
    asked = text.split(",")
    if unknown := [name for name in asked if name not in _STAGES]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(_STAGES)}.", param_hint="--stages")
    return tuple(sorted({_STAGES[name] for name in asked}))
