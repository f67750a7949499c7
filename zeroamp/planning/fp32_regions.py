"""`Fp32Regions`: the modules and tensors that stay in fp32 in every mode."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from zeroamp.planning.parameter_uses import modules_around


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp32Regions:
    """The modules and tensors that stay in fp32. Values name the key and the pattern, for reasons and errors."""

    modules: Mapping[str, str] = field(default_factory=dict)
    """FQN -> key and pattern, of the outermost modules. All modules inside them compute in fp32 too."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """FQN -> key and pattern, of parameters and buffers that a pattern matches directly. Their modules compute in the
    precision of the mode."""

    def pattern_of(self, fqn: str) -> str | None:
        """Return the key and pattern that keep the parameter, buffer or module `fqn` in fp32, or None."""
        if fqn in self.tensors:
            return self.tensors[fqn]
        return next((self.modules[outer] for outer in (*modules_around(fqn), fqn) if outer in self.modules), None)

    def modules_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the regions' modules, each once. FQNs that `model` does not have are skipped."""
        present = dict(model.named_modules(remove_duplicate=False))
        return list(dict.fromkeys(present[fqn] for fqn in self.modules if fqn in present))
