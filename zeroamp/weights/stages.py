"""The weights of all parts of a pipeline, in the order of the whole model, on the ranks of all stages.

[Note: Weights of stages]
All ranks exchange the names of the weights that their parts have. Weights that follow each other in the whole model and
are of one part are all-gathered in buckets by the ranks of its stage. These ranks send each bucket along the axis of
the stages. Before that, all ranks exchange the bucket's names and shapes: an error of one rank is raised on all.
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
import torch.distributed as dist

from zeroamp.pipelines.gradients import is_counted, is_summed
from zeroamp.planning.mesh import device_of, is_first_rank
from zeroamp.policies.errors import CheckpointError
from zeroamp.rank_group import RankGroup
from zeroamp.weights.buckets import naming_lost_ranks, one_by_one, whole_weights
from zeroamp.weights.layouts import joins_tensors, outline_of_model, publish
from zeroamp.weights.model_weights import Weight, find_weights
from zeroamp.wrapping.state import WrapState, models_of

Bucket = dict[str, torch.Tensor]
Place = tuple[int, int]
"""The number of a part on its rank, and the rank of its stage in the pipeline axis."""


@torch.no_grad()
def weights_of_stages(
    call: str, state: WrapState, dtype: torch.dtype | None, bucket_bytes: int, *, is_published: bool, to_all: bool
) -> Iterator[Bucket]:
    """Yield buckets of whole weights by name: see [Note: Weights of stages]. All ranks iterate to the end.

    Tensors are on the device of the mesh. With `to_all` False, only the buckets of the first rank have tensors. Clear a
    bucket when it is used.

    Raises:
        CheckpointError: two parts have a parameter of the same name, or a rank failed.
        PeerError: another rank does not take part. It names `call`.
    """
    models, stages, mesh = models_of(state), state.axes.stages, state.axes.whole
    stage = 0 if stages is None else stages.get_local_rank()
    own: dict[str, Weight] = {}

    def find() -> tuple[list[tuple[Place, str, bool]], list[tuple[str, str]]]:
        found: list[tuple[Place, str, bool]] = []
        copies: list[tuple[str, str]] = []
        for number, model in enumerate(models):
            weights = list(find_weights(model))
            for weight in filter(partial(_is_first_copy, model), weights):
                names = weight.written_names if is_published else weight.names[:1]
                own.update((name, weight) for name in names)
                found += [((number, stage), name, weight.is_parameter) for name in names]
            if is_first_rank(state.mesh):
                copies += _unsummed_copies(model, weights)
        return (found, copies) if is_first_rank(state.mesh) else ([], [])  # the ranks of one stage have the same parts

    found, copies = zip(*RankGroup.for_saving(mesh, call).run(find), strict=True)
    places = _places(chain.from_iterable(found))
    _refuse_different_copies(chain.from_iterable(copies))
    for (number, source), names in groupby(_in_order_of_model(places), key=places.__getitem__):
        outline = outline_of_model(models[number]) if is_published and source == stage else None
        named = [(name, own[name]) for name in names if source == stage]
        buckets = whole_weights(call, named, mesh, dtype, bucket_bytes, by_layer=joins_tensors(outline))
        while True:
            bucket: Bucket = {}
            of_ranks = RankGroup.for_saving(mesh, call).run(partial(_take, buckets, outline, bucket))
            layout = max(of_ranks, key=len)  # the ranks of other stages have none
            if not layout:
                break
            if stages is not None and (to_all or _is_line_of_first(stages.mesh, mesh.mesh)):
                if source != stage:
                    for name, shape, written in layout:
                        bucket[name] = torch.empty(shape, dtype=written, device=device_of(mesh))
                _send(call, bucket, stages.get_group(), source)
            if not to_all and not is_first_rank(mesh):
                bucket.clear()
            yield bucket


def _is_first_copy(model: Any, weight: Weight) -> bool:
    """Return whether a weight is written. The second copy of a weight that two stages have is not written.

    transformers lists the names that are tied to another one. Other copies are known once `sum_tied_gradients` got
    them.
    """
    tied = getattr(model, "all_tied_weights_keys", None)
    return not all(name in tied for name in weight.names) if tied else is_counted(weight.tensor)


def _unsummed_copies(model: Any, weights: Iterable[Weight]) -> Iterator[tuple[str, str]]:
    """Yield (name of the tied weight, SHA-256 of the shard) of copies that `sum_tied_gradients` did not get."""
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for weight in weights:
        for name in {tied.get(name, name) for name in weight.names} & {*tied.values()}:
            if not is_summed(weight.tensor):
                shard = weight.local.detach().cpu().contiguous().flatten().view(torch.uint8)
                yield name, hashlib.sha256(shard.numpy().tobytes()).hexdigest()


def _refuse_different_copies(found: Iterable[tuple[str, str]]) -> None:
    """Raise CheckpointError if two stages trained copies of a tied weight apart: only one of them would be written."""
    shards: dict[str, str] = {}
    for name, digest in found:
        if shards.setdefault(name, digest) != digest:
            raise CheckpointError(
                f"Two stages have copies of the tied weight {name} with different values, so that one would be lost. "
                "Call zeroamp.sum_tied_gradients in each optimizer step, which trains them as one weight."
            )


def _take(buckets: Iterator[Bucket], outline: Any, bucket: Bucket) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Move this rank's next weights into `bucket`, as they are published. Return their names, shapes and dtypes."""
    found = next(buckets, {})
    publish(outline, found)
    bucket.update((name, tensor.contiguous()) for name, tensor in one_by_one(found))
    return [(name, tensor.shape, tensor.dtype) for name, tensor in bucket.items()]


def _send(call: str, bucket: Bucket, group: dist.ProcessGroup, source: int) -> None:
    """Fill the tensors of a bucket on the ranks of a line of stages with those of rank `source` in it."""
    with naming_lost_ranks(call):
        for tensor in bucket.values():
            if tensor.numel() > 0:  # as bytes, because backends do not have all dtypes
                dist.broadcast(tensor.flatten().view(torch.uint8), group=group, group_src=source)


def _is_line_of_first(line: torch.Tensor, mesh: torch.Tensor) -> bool:
    """Return whether the ranks of a line have the first rank of a mesh."""
    return bool((line == mesh.flatten()[0]).any())


def _places(found: Iterable[tuple[Place, str, bool]]) -> dict[str, Place]:
    """Return the part of each weight, in the order of the parts. Of a buffer in several parts, that of the first one.

    Raises:
        CheckpointError: two parts have a parameter of the same name.
    """
    places: dict[str, Place] = {}
    for place, name, is_parameter in sorted(found, key=lambda each: each[0]):
        if places.setdefault(name, place) != place and is_parameter:
            raise CheckpointError(
                f"Two stages have a parameter {name}, so that one would be lost. Keep the names that parameters have "
                "in the whole model: do not number layers anew. Of a weight that two stages share, call "
                "zeroamp.sum_tied_gradients in each optimizer step: one copy is then left out."
            )
    return places


def _in_order_of_model(names: Iterable[str]) -> list[str]:
    """Sort names, which are in the order of the parts, as the whole model has them.

    Numbers in names are in their order. Others are in the order in which the parts have them.
    """
    numbers: dict[tuple[str, ...], int] = {}

    def key(name: str) -> list[int]:
        path = name.split(".")
        prefixes = (tuple(path[: end + 1]) for end in range(len(path)))
        return [int(each[-1]) if each[-1].isdecimal() else numbers.setdefault(each, len(numbers)) for each in prefixes]

    return sorted(names, key=key)
