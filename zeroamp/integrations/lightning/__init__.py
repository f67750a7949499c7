"""Lightning: strategies for `lightning.fabric.Fabric` and `lightning.pytorch.Trainer`. Tested with lightning 2.6.6.

Importing this package registers "zeroamp" and "zeroamp_stage_0" to "zeroamp_stage_3" as names of strategies::

    import zeroamp.integrations.lightning
    Trainer(strategy="zeroamp_stage_2", precision="bf16-mixed")

    from zeroamp.integrations.lightning import FabricZeroampStrategy, ZeroampStrategy
    Fabric(strategy=FabricZeroampStrategy("config.json"))
    Trainer(strategy=ZeroampStrategy("config.json"))

There are two classes, because Lightning's strategies for Fabric and for Trainer have different base classes.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from zeroamp.integrations.lightning.fabric import ZeroampStrategy as FabricZeroampStrategy
from zeroamp.integrations.lightning.trainer import ZeroampStrategy

__all__ = ["FabricZeroampStrategy", "ZeroampStrategy"]

FabricZeroampStrategy.register_strategies(STRATEGY_REGISTRY)
ZeroampStrategy.register_strategies(StrategyRegistry)
