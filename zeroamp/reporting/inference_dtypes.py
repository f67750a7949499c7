"""`inference_dtypes`: the compute dtypes of a ledger, by the names that inference engines use."""

from typing import Any

import torch

from zeroamp.ledger.explain import Ledger
from zeroamp.policies.dtypes import DTYPE_BY_NAME


def inference_dtypes(ledger: Ledger) -> dict[str, Any]:
    """Return the dtypes in which a model computes in training, as values that JSON can hold, for an inference engine.

    "dtype": the config's low dtype, or float32. "head_dtype": that of the module `lm_head`, if it is fixed. "modules":
    FQN -> compute dtype, for each module that owns parameters or is kept in fp32. Modules whose ops autocast chooses,
    such as norms, are left out. vLLM takes the first two, in its argument and in the model's config:
    `LLM(model, dtype=found["dtype"], hf_overrides={"head_dtype": found["head_dtype"]})`.

    Examples:
        >>> import json
        >>> policy = zeroamp.policy_from_config({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
        >>> model = zeroamp.wrap_model(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), policy)
        >>> json.dumps(zeroamp.inference_dtypes(zeroamp.explain(model)))
        '{"dtype": "bfloat16", "modules": {"0": "bfloat16"}}'
    """
    plan = ledger.plan
    by_owner: dict[str, set[str]] = {}
    for param in plan.params:
        for owner in param.owner_fqns:
            by_owner.setdefault(owner, set()).add(param.dtypes.compute)
    modules = {
        owner: _long(DTYPE_BY_NAME[compute])
        for owner, (compute, *others) in by_owner.items()
        if not others and compute in DTYPE_BY_NAME
    }
    modules |= dict.fromkeys(plan.fp32_regions.modules, "float32")  # with a tied weight, the module alone
    heads = {dtype for owner, dtype in modules.items() if owner.rpartition(".")[2] == "lm_head"}
    head = {"head_dtype": heads.pop()} if len(heads) == 1 else {}
    return {"dtype": _long(plan.policy.param_dtype), **head, "modules": modules}


def _long(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
