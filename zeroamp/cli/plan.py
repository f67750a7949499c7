"""The command `zeroamp plan`: predicts memory, traffic and time of a run."""

import json
import logging
import re
import sys
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from zeroamp.cli.axis_sizes import AxisSizes
from zeroamp.cli.model_source import check_source, load_inputs, load_model
from zeroamp.cli.options import (
    MESH_HELP,
    Auto,
    AutoWrap,
    ConfigPath,
    GpusPerNode,
    Html,
    Inputs,
    Model,
    Verbosity,
    auto_values,
    mesh_sizes,
    messages_to_stderr,
)
from zeroamp.cli.planned import model_on_axes
from zeroamp.dry_run.efficiency import Efficiency, efficiency_of
from zeroamp.dry_run.gpus import GPUS, find_gpu
from zeroamp.dry_run.plot import drawn_timeline
from zeroamp.dry_run.render import title
from zeroamp.dry_run.run_plan import plan_run
from zeroamp.meshes.refused_meshes import refuse_sizes
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Stage, policy_from_config
from zeroamp.reporting.files import check_picture
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
    mesh: Annotated[
        str | None, typer.Option(metavar="RxS|AXES", help=f"Replicas x shards of stages 1 to 3. Or: {MESH_HELP}")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples per micro-batch and rank. Default: the config's.")
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 2048,
    stages: Annotated[str, typer.Option(metavar="LIST", help="ZeRO stages to compare.")] = ",".join(_STAGES),
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="Each unit recomputes its forward.")
    ] = False,
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "h100",
    gpus_per_node: GpusPerNode = 8,
    intra: Annotated[
        float | None, typer.Option(metavar="GB/S", min=0.001, help="From a GPU into its node, one direction.")
    ] = None,
    inter: Annotated[
        float | None, typer.Option(metavar="GB/S", min=0.001, help="From a GPU to other nodes, one direction.")
    ] = None,
    compute_efficiency: Annotated[
        float | None,
        typer.Option("--compute-efficiency", min=0.01, max=1, help="Fraction of the peak FLOP/s that is reached."),
    ] = None,
    inputs: Inputs = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, in bytes and seconds.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also plot the memory over the step; needs matplotlib.")
    ] = None,
    page: Html = None,
    auto: Auto = None,
    auto_wrap: AutoWrap = None,
    verbose: Verbosity = 0,
) -> None:
    """Predict memory, traffic and time of an optimizer step at every ZeRO stage, without weights, GPUs or ranks."""
    chosen, values = _stages(stages), auto_values(auto or [])
    with messages_to_stderr(verbose):
        efficiency = _efficiency(gpu, compute_efficiency)
        sizes = mesh_sizes(mesh if mesh is not None and "=" in mesh else None, world_size)
        shape = _mesh(mesh) if sizes is None else _shape(sizes, seq)
        if sizes is not None:
            world_size, seq = sizes.num_ranks, seq // sizes.context
        elif world_size is None:
            raise typer.BadParameter("the number of ranks is missing. Pass --world-size or --mesh dp=N.")
        policy = policy_from_config(config, world_size=world_size if sizes is None else sizes.num_data, **values)
        check_source(model)
        if plot is not None:
            check_picture(plot)
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
                gpu=gpu,
                gpus_per_node=gpus_per_node,
                intra_gb_per_s=intra,
                inter_gb_per_s=inter,
                efficiency=efficiency,
                inputs=None if inputs is None else load_inputs(inputs),
                auto_wrap_policy=auto_wrap,
            )
        typer.echo(json.dumps(run.to_dict(), indent=2, allow_nan=False) if as_json else run)
        if plot is not None:
            run.plot(plot)
        if page is not None:
            data = {"plan": run.to_dict(), "timelines": [drawn_timeline(stage) for stage in run.stages]}
            write_page(page, html_page("plan", f"plan of {model}", title(run), data))
            typer.echo(f"wrote {page}", err=True)


def _efficiency(gpu: str, compute: float | None) -> Efficiency:
    usual = efficiency_of(find_gpu(gpu))
    if compute is None:
        return usual
    return replace(usual, compute=compute, origin=f"compute as given, the others {usual.origin}")


def _shape(sizes: AxisSizes, seq: int) -> tuple[int, int]:
    """Return replicas and shards. Refuse a sequence that the context ranks do not divide."""
    if seq % sizes.context:
        raise ConfigError(
            f"--seq {seq} must be a multiple of the {sizes.context} ranks of the context axis. Change one."
        )
    if sizes.distributes_parameters:
        logger.warning(
            "The plan leaves out the time of the collectives inside of the model, over the tensor or expert axis. The "
            "real step takes longer."
        )
    elif sizes.context > 1:
        logger.warning(
            "The plan leaves out the attention's exchange over the %d ranks of the context axis, and counts its "
            "products within each rank's part of the sequence only. The real step takes longer.",
            sizes.context,
        )
    return sizes.replicate, sizes.num_shards


def _mesh(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    if (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)) is None:
        raise typer.BadParameter(f"{text!r} is not RxS, such as 4x8.", param_hint="--mesh")
    return int(match[1]), int(match[2])


def _stages(text: str) -> "tuple[Stage, ...]":
    asked = text.split(",")
    if unknown := [name for name in asked if name not in _STAGES]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(_STAGES)}.", param_hint="--stages")
    return tuple(sorted({_STAGES[name] for name in asked}))
