"""At stage 3 the unsharded parameters are gone between forward and backward, autocast or not."""

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.models.small import batch, build
from tests.processes.training import config, wrapped


def _kept_weight_bytes(model, inputs, forward):
    """Bytes of matrices that autograd keeps for backward and that hold parameters' values, whole or cast."""
    sizes = {tuple(p.shape) for block in model.blocks for p in block.parameters() if p.dim() == 2}
    sizes |= {size[::-1] for size in sizes}
    kept = {}

    def pack(tensor):
        if tuple(tensor.shape) in sizes:
            kept[id(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(inputs)
    num_bytes = sum(storage.size() for storage in kept.values())
    loss.backward()
    return num_bytes


def _measure():
    inputs = batch("llama_tied", 0)
    ours = wrapped("llama_tied", config(3))
    theirs = build("llama_tied")
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)

    def with_autocast(tokens):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return theirs(tokens)

    return _kept_weight_bytes(ours, inputs, ours), _kept_weight_bytes(theirs, inputs, with_autocast)


def _gathered_between_forward_and_backward(stage, threshold):
    model = wrapped("llama_tied", config(stage, threshold=threshold))
    loss = model(batch("llama_tied", 0))
    gathered = {fqn for fqn, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    loss.backward()
    return gathered, {fqn for fqn, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}


def test_stage_3_releases_units_and_their_typed_groups_after_forward(ranks2):
    root = {"embed.weight", "norm.weight"}
    assert ranks2.run(_gathered_between_forward_and_backward, 3, 0)[0] == (root, set())
    norms = {f"blocks.{i}.norm{j}.weight" for i in range(3) for j in (1, 2)}
    assert ranks2.run(_gathered_between_forward_and_backward, 3, 100_000)[0] == (root | norms, set())


def test_stage_2_keeps_everything_gathered_until_the_backward(ranks2):
    gathered, after = ranks2.run(_gathered_between_forward_and_backward, 2, 0)[0]
    assert len(gathered) == len(dict(build("llama_tied").named_parameters()))
    assert after == set()


def test_autocast_keeps_no_replica_of_the_weights(ranks2):
    ours, fsdp2_and_autocast = ranks2.run(_measure)[0]
    linear_elements = sum(p.numel() for p in build("llama_tied").blocks.parameters() if p.dim() == 2)
    assert ours == 0
    assert fsdp2_and_autocast == 2 * linear_elements  # the whole model's Linear weights in bf16, at once
