"""`deepspeed.moe.layer`: its names can be imported, and raise when they are used."""

from typing import Any

from zeroamp.deepspeed.refused import EXPERTS, Refused, unknown


def __getattr__(name: str) -> Any:
    if name in EXPERTS:
        return Refused(f"moe.{name}", EXPERTS[name])
    if name.startswith("__"):
        raise AttributeError(name)
    raise unknown(__name__, name, EXPERTS)
