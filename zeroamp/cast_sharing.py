"""Which modules share the low-precision copies of what they read, under autocast. See `hooks/shared_casts.py`."""

from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks import SharedCasts, linears_that_may_share
from zeroamp.plan import Plan


def share_casts(model: nn.Module, plan: Plan, device_type: str) -> list[RemovableHandle]:
    """Let the safe Linears of each unit share casts where the policy says so; return the hooks' handles.

    Modules of the plan that the model does not have are left out.
    """
    if plan.policy.mode != "autocast" or not plan.policy.share_casts:
        return []
    modules = dict(model.named_modules())
    safe: dict[str, dict[str, nn.Module]] = {}  # unit -> its modules, each once
    for param in plan.params:
        if param.dtypes.gather != param.dtypes.storage:
            found = {fqn: modules[fqn] for fqn in param.owner_fqns if fqn in modules}
            safe.setdefault(param.unit, {}).update(found)
    casts = SharedCasts(device_type)
    return [casts.attach(linear) for unit in safe.values() for linear in linears_that_may_share(unit.values())]
