"""`add_config_arguments`, and the config of `initialize` with DeepSpeed's defaults."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from zeroamp.policies.errors import ConfigError
from zeroamp.policies.json_values import load_config

ConfigLike = Mapping[str, Any] | str | os.PathLike[str]

DeepSpeedConfigError = ConfigError
"""DeepSpeed's name for the error of a wrong config, for scripts that catch it."""


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a parser, and return the parser.

    `initialize(args=)` reads `--deepspeed_config`, the path of a JSON file. It does not read `--deepspeed`.
    """
    group = parser.add_argument_group("DeepSpeed", "the API of DeepSpeed, on zeroamp")
    group.add_argument("--deepspeed", action="store_true", help="for the script; initialize() does not read it")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of a config in JSON")
    return parser


def config_of(args: object, config: ConfigLike | None, config_params: ConfigLike | None = None) -> dict[str, Any]:
    """Return a copy of the config of `initialize`, with those defaults of DeepSpeed that change the update.

    Gradients are clipped to norm 1, bf16 steps with non-finite gradients are skipped, and all ranks get the first
    rank's weights and buffers.

    Args:
        args: its `deepspeed_config` is a path or a mapping, or None.
        config: a mapping or a path; None if `args` has it.
        config_params: the old name of `config`.

    Raises:
        ConfigError: no config is given, or two are.
    """
    given = [each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each is not None]
    if len(given) != 1:
        raise ConfigError(
            f"initialize() must be given one config, but got {len(given) or 'none'}. Pass config= as a mapping or the "
            "path of a JSON file, or args with deepspeed_config."
        )
    found = load_config(given[0])
    found.setdefault("gradient_clipping", 1.0)
    bf16 = found.get("bf16")
    if isinstance(bf16, dict) and bf16.get("enabled") is True:
        bf16.setdefault("check_grad_overflow", True)
    own = found.setdefault("zeroamp", {})
    if isinstance(own, dict) and "zeroamp.sync_module_states" not in found:
        own.setdefault("sync_module_states", True)
    return found
