"""One checkpoint of all parts of a pipeline, in the form of a checkpoint of the whole model.

The tensors of all parts have the names of the whole model, and torch.distributed.checkpoint writes those of all ranks.
What a save writes beside them is joined, so that any number of stages can load it: the first rank's file also has the
buffers, extra states and plain optimizer state of the other stages, and the param groups have the names of all
parameters. A rank that loads leaves out what belongs to the parts of other ranks.
"""

import io
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from zeroamp.planning.mesh import is_first_rank
from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.rank_group import RankGroup
from zeroamp.wrapping.state import WrapState

T = TypeVar("T")
Content = dict[str, Any]

_OF_PARTS = ("tensors", "extra_states")
"""Keys of a rank's values: name -> value."""


def parts_of(root: nn.Module) -> list[str]:
    """Return what a rank's file says of its parts: a load by a rank with other ones does not read that file."""
    return sorted(name for name, _ in root.named_parameters())


def collect_all(
    ranks: RankGroup,
    state: WrapState,
    collect: Callable[[], tuple[Content, Content]],
    to_bytes: Callable[[Content], bytes],
) -> Callable[[], tuple[Content, Content]]:
    """Call `collect` on all ranks. Return a function that returns its results, on the first rank those of all stages.

    `collect` returns a rank's own values and the values that are the same on all ranks of its stage. `to_bytes` encodes
    values as a file of `torch.save`, or raises.
    """
    own: list[tuple[Content, Content]] = []

    def snapshot() -> bytes:
        own.append(collect())
        content, values = own[0]
        content["parts"] = parts_of(state.root)
        sent = {key: content[key] for key in (*_OF_PARTS, "optimizers")}
        # As bytes, which another rank reads to its CPU. The ranks of one stage have the same.
        return to_bytes({"of_rank": sent, "of_all": values}) if is_first_rank(state.mesh) else b""

    of_ranks = ranks.gather(snapshot)

    def joined() -> tuple[Content, Content]:
        content, values = own[0]
        for other in of_ranks[1:]:
            if other:
                sent = torch.load(io.BytesIO(other), map_location="cpu", weights_only=True)
                _add(content, values, sent["of_rank"], sent["of_all"])
        return content, values

    return joined


def _add(content: Content, values: Content, of_other: Content, values_of_other: Content) -> None:
    """Add the values of another stage to those of the first rank."""
    for key in _OF_PARTS:
        content[key] = of_other[key] | content[key]
    values["excluded"] += values_of_other["excluded"]
    ours, theirs = values["optimizers"], values_of_other["optimizers"]
    if len(ours) != len(theirs):
        raise CheckpointError(
            f"The first stage has {len(ours)} optimizers, but another one has {len(theirs)}, so their states cannot be "
            "joined. Build as many on each rank, such as one for all parts of a rank."
        )
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        content["optimizers"][number] = of_other["optimizers"][number] | content["optimizers"][number]
        form, form_there = _form(one), _form(other)
        if differing := [key for key in form | form_there if form.get(key) != form_there.get(key)]:
            texts = [f"{key} is {form.get(key)} and {form_there.get(key)}" for key in differing]
            raise CheckpointError(
                f"Optimizer {number} differs between stages, so that its states cannot be joined: {some_of(texts, 3)}. "
                "Build optimizers of one class on all stages, with the same param groups (one may be empty) and "
                "hyperparameters."
            )
        for group, group_there in zip(one["groups"], other["groups"], strict=True):
            group["params"] = [*group["params"], *group_there["params"]]
        one["sharded"] |= other["sharded"]
        one["layouts"] |= other["layouts"]


def _form(description: Content) -> dict[str, str]:
    """Return the class of an optimizer, and its hyperparameters by param group, as text."""
    values = {
        f"{key} of param group {number}": str(value)
        for number, group in enumerate(description["groups"])
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    return {"the class": description["class"], **values}


def own_share(
    content: Content, values: Content, layouts: Mapping[str, T], is_elsewhere: Callable[[str], bool]
) -> tuple[Content, Content, dict[str, T]]:
    """Return what a checkpoint has for the parts of this rank: values of a rank, values of all ranks, and layouts.

    `is_elsewhere` tells whether a name, as in the model or as in the checkpoint, is that of another rank's part.
    """

    def own(named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in named.items() if not is_elsewhere(name)}

    def own_names(names: Collection[str]) -> list[str]:
        return [name for name in names if not is_elsewhere(name)]

    content = content | {key: own(content[key]) for key in _OF_PARTS}
    content["optimizers"] = [own(states) for states in content["optimizers"]]
    descriptions = [
        described
        | {key: own(described[key]) for key in ("sharded", "layouts")}
        | {"groups": [group | {"params": own_names(group["params"])} for group in described["groups"]]}
        for described in values["optimizers"]
    ]
    values = values | {"optimizers": descriptions, "excluded": own_names(values["excluded"])}
    return content, values, own(layouts)
