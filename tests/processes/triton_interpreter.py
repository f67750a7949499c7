"""Runs Triton kernels on CPU tensors, in Triton's interpreter. Imports nothing of zeroamp."""

import os

import numpy as np
import torch


def interpret():
    """Switch the interpreter on in this process, which has not imported triton, and add what Liger's kernels need.

    The interpreter passes floats as Python's, has no libdevice, and computes with the bits of bf16 as with integers.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    def converted(argument):
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    def in_fp32(builder, left, right, op):
        if left.dtype.is_ptr() or left.dtype.scalar != tl.bfloat16 or right.dtype.scalar != tl.bfloat16:
            return binary_op(builder, left, right, op)
        out = op(_widened(left.data), _widened(right.data))
        if out.dtype == np.bool_:
            return interpreter.TensorHandle(out, tl.int1)
        return interpreter.TensorHandle(torch.from_numpy(out).bfloat16().view(torch.uint16).numpy(), tl.bfloat16)

    def rsqrt(x):
        return tl.rsqrt(x)  # looked up here: the interpreter replaces it while a kernel runs

    convert, binary_op = interpreter._implicit_cvt, interpreter.InterpreterBuilder.binary_op
    interpreter._implicit_cvt, interpreter.InterpreterBuilder.binary_op = converted, in_fp32
    libdevice.rsqrt = rsqrt


def _widened(bits):
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16).float().numpy()
