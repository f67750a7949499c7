"""torch's context parallelism, also on the CPU.

The ranks of the axis send their keys and values around in a ring. torch has handlers for the attention kernels of CUDA
only. `parts_of_sequences` adds handlers for the CPU's flash kernel, which call torch's own ring.
"""

import contextlib
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention

SEQUENCE = 2  # the dimension of queries, keys and values
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@contextlib.contextmanager
def parts_of_sequences(mesh, inputs):
    """Inside, `inputs` hold this rank's part of each sequence, and `scaled_dot_product_attention` sees all parts."""
    buffers = [each.clone() for each in inputs]
    on_cpu = {FLASH: _forward, FLASH_BACKWARD: _backward} if mesh.device_type == "cpu" else {}
    parts = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers))
    # torch never removes the entries of `_replaced_functions`, which hold the mesh.
    with patch.dict(_attention.custom_ops, on_cpu), patch.dict(_attention._replaced_functions), parts:
        yield buffers


def _forward(op, args, kwargs):
    mesh, (query, key, value, *more), kwargs = _local(args, kwargs)
    dropout_p, is_causal = _options(*more)
    parts = _attention._templated_ring_attention(
        mesh.get_group(), SEQUENCE, op, query, key, value, is_causal=is_causal, dropout_p=dropout_p, **kwargs
    )
    return _distributed(parts, mesh)


def _backward(op, args, kwargs):
    mesh, (grad_out, query, key, value, out, logsumexp, dropout_p, is_causal), kwargs = _local(args, kwargs)
    parts = _attention._templated_ring_attention_backward(
        *(mesh.get_group(), SEQUENCE, op, grad_out, "grad_out", query, key, value, out, logsumexp, is_causal),
        dropout_p=dropout_p,
        **kwargs,
    )
    return _distributed(parts, mesh)


def _options(dropout_p=0.0, is_causal=False):
    return dropout_p, is_causal


def _local(args, kwargs):
    mesh = next(each.device_mesh for each in args if isinstance(each, DTensor))
    return mesh, [_plain(each) for each in args], {name: _plain(each) for name, each in kwargs.items()}


def _plain(value):
    return value.to_local() if isinstance(value, DTensor) else value


def _distributed(parts, mesh):
    return tuple(DTensor.from_local(part, mesh, [Shard(SEQUENCE)], run_check=False) for part in parts)
