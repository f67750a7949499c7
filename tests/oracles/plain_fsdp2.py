"""The oracle: FSDP2 alone, driven by a plain loop. Imports nothing of zeroamp."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def train(model, units, losses_of, *, world_size, param_dtype=None, loss_scale=1.0, lr=1e-2):
    """Shard `model` and its `units` (FQNs, children before parents), train it, and return (losses, full parameters).

    losses_of: yields, for the model, one loss per optimizer step. param_dtype: of FSDP2's policy, whose sums are fp32.
    """
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for module in (*(model.get_submodule(fqn) for fqn in units), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    losses = []
    for loss in losses_of(model):
        losses.append(float(loss.detach()))
        (loss.float() * loss_scale).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(loss_scale)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {fqn: parameter.full_tensor().detach() for fqn, parameter in model.named_parameters()}
