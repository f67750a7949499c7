"""The command line: `zeroamp check`, `explain`, `plan`, `report`, `profile`, `compare` and `sensitivity`.

Data goes to stdout, all else to stderr. Exit codes: 0, 1 for a mistake in config or model, 2 for a mistake in the
arguments. What imports torch is imported inside of the commands: `--help` takes a tenth of the time.
"""

import json
import logging
import os
import runpy
import signal
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zeroamp
from zeroamp.cli import arguments
from zeroamp.cli.compare import add_arguments, compare
from zeroamp.cli.model_source import load_function, load_model
from zeroamp.cli.sensitivity import add_arguments as add_sensitivity_arguments
from zeroamp.cli.sensitivity import sensitivity
from zeroamp.dry_run.gpu_memory import GPUS_GB
from zeroamp.policies.errors import ConfigError, StepError, ZeroAmpError, nearest, printable, some_of
from zeroamp.policies.numbers import counted
from zeroamp.reporting.page import check_page, write_page
from zeroamp.reporting.tables import paragraph

if TYPE_CHECKING:
    from zeroamp.planning.plan import Plan
    from zeroamp.policies.policy import Policy

TRACED_TOKENS = 2048
"""Sequence length of `zeroamp plan`, and of the inputs of a traced run, whose batch is 1."""


ERASE_LINE = "\x1b[K"


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and print what it returns. Print a `ZeroAmpError` to stderr without a traceback, and exit with 1.

    Args:
        argv: the arguments. None: those of the process.
    """
    try:
        options = _parse(list(sys.argv[1:] if argv is None else argv))
    except SystemExit:  # also after --help, whose text may be in the buffer of stdout
        _write("")
        raise
    if options.command is profile:  # the script logs, prints and fails by itself
        profile(options)
        return
    try:
        # A factory may print, and stdout may be parsed.
        with redirect_stdout(sys.stderr), _progress(is_logged=options.command is sensitivity):
            text = options.command(options)
    except ZeroAmpError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(1)
    if text:  # of several ranks, the first prints
        _write(printable(f"{text}\n"))


def _parse(argv: list[str]) -> Namespace:
    """Return the arguments. For a command that does not exist, name the most similar one, and exit with 2."""
    root, *commands = parsers()
    names = [parser.prog.split()[-1] for parser in commands]
    if argv and not argv[0].startswith("-") and argv[0] not in names:
        root.error(f"there is no command {argv[0]!r}. {nearest(argv[0], names)} The commands are {', '.join(names)}.")
    return root.parse_args(argv)


def _write(text: str) -> None:
    """Write `text` to stdout. If its reader has gone, exit without a message, as other tools do."""
    try:
        if sys.stdout is not None:  # None: it was closed from the start
            sys.stdout.write(text)
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it exits
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"Error: stdout cannot be written: {error.strerror}.\n")
            sys.exit(1)
        sys.exit(128 + signal.SIGPIPE)


def check(options: Namespace) -> str:
    """Print how every key of a config is used, or what is wrong with it."""
    from zeroamp.optimizers.schedulers import warn_of_long_warmup

    if options.config is None and not options.all:
        raise ConfigError("The config is missing. Name a JSON file, or list all keys with --all.")
    if options.model is None and (options.auto_wrap is not None or options.inputs is not None):
        raise ConfigError("--auto-wrap and --inputs are about a model. Name one with --model, or leave them out.")
    opened = {} if options.config is None else zeroamp.open_auto_keys(options.config)
    left = [path for path, names in opened.items() if not dict(options.auto).keys() & names]
    config = _without(left, options) if left else None
    policy = zeroamp.policy_from_config({}) if options.config is None else _policy(options, options.world_size, config)
    if policy.scheduler is not None:
        warn_of_long_warmup(policy.scheduler.params)
    plan = None if options.model is None else _plan_of(options, policy)
    is_about_something = options.config is not None or options.model is not None
    lines = [_first_line(options, policy, plan), ""] if is_about_something else []
    lines.append(policy.report(defaults=options.all))
    if left:
        lines.append(
            f'"auto", and not checked: {some_of(left, len(left))}. A Trainer of transformers and a ZeroampAccelerator '
            "fill these keys by their arguments. To check a value, pass --auto KEY=VALUE."
        )
    if _assumed(left) is not None:
        lines.append("bf16 is assumed.")
    if not options.all:
        lines.append("--all lists all other keys with their defaults.")
    if plan is None:
        lines.append("--model also checks the names of modules and classes.")
    elif plan.policy.overrides:
        lines.append(f"\n{_describe_overrides(plan)}")
    return "\n".join(lines)


def _first_line(options: Namespace, policy: "Policy", plan: "Plan | None") -> str:
    """Return mode and stage; with a model also its units, groups and the share in low precision."""
    names = " and ".join(str(name) for name in (options.config, options.model) if name is not None)
    is_plain = " (none of torch_autocast, bf16 and fp16 is enabled)" * (policy.mode == "fp32")
    parts = [f"{names}: mode {policy.mode}{is_plain}", f"ZeRO stage {policy.stage}"]
    if plan is not None:
        parts.append(f"{counted(len(plan.units), 'FSDP unit')} below the root")
        parts.append(counted(len(plan.groups), "parameter group"))
        parts += filter(None, [plan.describe_low_share()])
    return ", ".join(parts)


def _without(left: Collection[str], options: Namespace) -> dict[str, Any]:
    """Return the config without the keys in `left`, which are "auto". Of the precisions it then has bf16."""
    from zeroamp.policies.auto_values import without_open_keys

    config = without_open_keys(options.config, dict(options.auto))
    if (block := _assumed(left)) is not None:
        dtype = {"dtype": "bfloat16"} if block == "torch_autocast" else {}
        config[block] = {**dtype, **config.get(block, {}), "enabled": True}
    return config


def _assumed(left: Collection[str]) -> str | None:
    """Return the block of the precision that `_without` enables; None if the config, or --auto, sets one."""
    return next((block for block in ("torch_autocast", "bf16") if f"{block}.enabled" in left), None)


def _describe_overrides(plan: "Plan") -> str:
    """Return a line per override: what it applies to."""
    from zeroamp.module_dtypes.extension import overridden

    lines = []
    for index, asked in enumerate(plan.policy.overrides):
        params = overridden(plan, index)
        names = f": {some_of([param.fqn for param in params], 4)}" if params else ""
        lines.append(f"zeroamp.overrides.{index}: {asked.settings()} for {counted(len(params), 'parameter')}{names}")
    return paragraph("\n".join(lines))


def explain(options: Namespace) -> str:
    """Print the dtype ledger: the dtypes of every parameter, and the bytes of an optimizer step.

    The model is built on the meta device. Bytes per rank need --world-size.
    """
    from zeroamp.dry_run.run_plan import ranks_at
    from zeroamp.planning.mesh import Ranks

    policy = _policy(options, options.world_size)
    check_page(options.html)
    plan = _plan_of(options, policy)
    ranks = Ranks() if options.world_size is None else ranks_at(policy, options.world_size)
    ledger = zeroamp.Ledger(plan=plan, **asdict(ranks))
    name, data = Path(options.model).name, ledger.to_dict()
    write_page(options.html, "ledger", f"Dtype ledger of {name}", ledger.title(), data, {"Config": data["config"]})
    if options.json:
        return _to_json(data)
    return f"{ledger}\n\n{ledger.per_parameter()}" if options.per_parameter else str(ledger)


def plan(options: Namespace) -> str:
    """Predict memory and traffic of an optimizer step at every ZeRO stage, without weights, GPUs or ranks."""
    policy = _policy(options, options.world_size)
    check_page(options.html)
    run = zeroamp.plan_run(
        load_model(options.model),
        policy,
        world_size=options.world_size,
        batch=options.batch,
        seq=options.seq,
        checkpointing=options.checkpointing,
        offload_activations=options.offload_activations,
        gpu=options.gpu,
        inputs=None if options.inputs is None else load_function(options.inputs, "--inputs"),
        loss_fn=None if options.loss is None else load_function(options.loss, "--loss"),
        auto_wrap_policy=options.auto_wrap,
    )
    timelines = [{"stage": stage.stage, **stage.memory.drawn()} for stage in run.stages]
    data = {"plan": run.to_dict(), "timelines": timelines}
    name, configs = Path(options.model).name, {"Config": run.policy.to_config()}
    write_page(options.html, "plan", f"Plan of {name}", run.title(), data, configs)
    return _to_json(run.to_dict()) if options.json else str(run)


def report(options: Namespace) -> str:
    """Print a table that compares one or several runs, finished or not."""
    from zeroamp.reporting import saved_runs

    check_page(options.html)
    runs = [saved_runs.read_run(path) for path in options.runs]
    data = saved_runs.runs_to_dict(runs)
    configs = {f"Config of {run['name']}": run["headers"][-1].get("config") for run in data["runs"]}
    title = f"Report of {', '.join(run['name'] for run in data['runs'])}"
    write_page(options.html, "runs", title, "Recorded by RunReport on the first rank.", data, configs)
    return _to_json(data) if options.json else saved_runs.table(runs)


def profile(options: Namespace) -> None:
    """Run a training script, and profile some optimizer steps of its first TrainStep.

    torchrun --nproc-per-node 2 -m zeroamp profile --out traces train.py --lr 1e-4

    The script runs to its end. The first rank prints its labels with their times.
    """
    recording = zeroamp.Profile(None, options.out, wait=options.wait, warmup=options.warmup, active=options.active)
    has_ended = False
    try:
        with recording, _as_main(options.script, options.arguments):
            try:
                runpy.run_path(str(options.script), run_name="__main__")
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    raise
            has_ended = True
    except StepError as error:
        if not has_ended:  # an error of the script, which keeps its traceback
            raise
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(1)
    if recording.rank == 0:
        _write(f"{recording}\n\n{recording.path}\n")


def parsers() -> list[ArgumentParser]:
    """Return the parser of the command line, and those of its commands."""
    root = ArgumentParser(
        prog="zeroamp",
        description="Show what a DeepSpeed-style config does and which dtypes a model gets, without a GPU, weights or "
        "ranks. Plan, profile and compare training runs.",
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=f"zeroamp {zeroamp.__version__}")
    commands = root.add_subparsers(metavar="COMMAND", required=True)

    of_check = arguments.add_command(commands, check)
    arguments.add_config(of_check, nargs="?")
    arguments.add_model(of_check, required=False)
    arguments.add_ranks(of_check, required=False)
    of_check.add_argument("--all", action="store_true", help="Also list the defaults of all other keys.")

    of_explain = arguments.add_command(commands, explain)
    arguments.add_config(of_explain)
    arguments.add_model(of_explain)
    arguments.add_ranks(of_explain, required=False)
    arguments.add_formats(of_explain, "One JSON object: config, units, summary, groups, parameters.")
    of_explain.add_argument(
        "--per-parameter", action="store_true", help="Also one row per parameter (--json has them always)."
    )

    of_plan = arguments.add_command(commands, plan)
    arguments.add_config(of_plan)
    arguments.add_model(of_plan)
    arguments.add_ranks(of_plan)
    add = of_plan.add_argument
    add("--batch", metavar="N", type=arguments.positive, help="Samples per rank and micro-batch; else the config's.")
    add(
        "--seq",
        metavar="N",
        type=arguments.positive,
        default=TRACED_TOKENS,
        help="Tokens per sample and rank. Default: 2048.",
    )
    add("--checkpointing", action="store_true", help="Each unit recomputes its forward.")
    add("--offload-activations", action="store_true", help="Forward and loss run under zeroamp.save_on_cpu.")
    gpu = f"One of {', '.join(GPUS_GB)} (the default is h100), or the memory of another GPU in GB."
    add("--gpu", metavar="NAME|GB", type=arguments.gpu, default="h100", help=gpu)
    add("--loss", metavar="FUNCTION", help="Of the model's output; returns the loss. Default: the output's .loss.")
    arguments.add_formats(of_plan, "One JSON object, in bytes.")

    of_report = arguments.add_command(commands, report)
    of_report.add_argument("runs", metavar="RUN.jsonl", type=Path, nargs="+", help="Files of RunReport.")
    arguments.add_formats(of_report, "One JSON object: the table, and every record.")

    of_profile = arguments.add_command(commands, profile)
    of_profile.add_argument("script", type=arguments.file, help="The training script.")
    of_profile.add_argument("arguments", nargs=REMAINDER, help="The script's arguments.")
    of_profile.add_argument("--out", type=Path, default=Path("traces"), help="Folder for the traces, one per rank.")
    of_profile.add_argument("--wait", metavar="N", type=int, default=1, help="Optimizer steps before profiling.")
    of_profile.add_argument("--warmup", metavar="N", type=int, default=1, help="Profiled steps to discard.")
    of_profile.add_argument("--active", metavar="N", type=int, default=3, help="Steps to record.")

    of_compare = arguments.add_command(commands, compare)
    add_arguments(of_compare)

    of_sensitivity = arguments.add_command(commands, sensitivity)
    add_sensitivity_arguments(of_sensitivity)
    return [root, of_check, of_explain, of_plan, of_report, of_profile, of_compare, of_sensitivity]


def _policy(options: Namespace, num_ranks: int | None, config: dict[str, Any] | None = None) -> "Policy":
    """Return the policy of the config, or of `config`, a part of it. The text of an error begins with the path."""
    from zeroamp.dry_run.run_plan import ranks_at

    given = options.config if config is None else config
    try:
        policy = zeroamp.policy_from_config(given, world_size=num_ranks, **dict(options.auto))
        if num_ranks is not None:
            ranks_at(policy, num_ranks)
        return policy
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if str(options.config) in text else f"{options.config}: {text}") from error


def _plan_of(options: Namespace, policy: "Policy") -> "Plan":
    """Return the plan of the model that the options name, on the meta device."""
    import torch

    model, inputs = load_model(options.model), None
    if options.inputs is not None:
        with torch.device("meta"):
            inputs = load_function(options.inputs, "--inputs")(1, TRACED_TOKENS)
    return zeroamp.build_plan(model, policy, options.auto_wrap, inputs)


def _to_json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, allow_nan=False)


@contextmanager
def _progress(*, is_logged: bool) -> Iterator[None]:
    """Show what is logged at level INFO on stderr: on a terminal each line in place of the one before.

    `is_logged`: whether the lines are also written, one below the other, if stderr is no terminal.
    """
    is_terminal = sys.stderr.isatty()
    if not (is_terminal or is_logged):
        yield
        return
    logger, lines = logging.getLogger("zeroamp"), logging.StreamHandler()
    lines.terminator = "\r" if is_terminal else "\n"
    lines.setFormatter(logging.Formatter(f"{ERASE_LINE * is_terminal}%(message)s"))
    lines.addFilter(lambda record: record.levelno == logging.INFO)
    # lastResort prints warnings, as it does without handlers.
    level, handlers = logger.level, [handler for handler in (lines, logging.lastResort) if handler is not None]
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
        logger.setLevel(level)
        sys.stderr.write(ERASE_LINE * is_terminal)


@contextmanager
def _as_main(script: Path, script_arguments: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as `python script.py` does."""
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *script_arguments], [str(script.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before
