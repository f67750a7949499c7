"""Hooks on modules, replacements of FSDP2's collectives, and runs that observe a model.

| package | what |
|---|---|
| `collectives` | the all-gather and the reduction of one parameter group, traffic counters |
| `precision` | autocast around the root's forward, modules kept in fp32 |
| `observers` | labels in traces, the dtypes that occur |
| `unit_hooks` | the order of all hooks on a module, and where they are registered |
| `root_forward` | the context managers around the root's forward, in order |
| `typed_groups` | several FSDP2 parameter groups per unit, one for each combination of dtypes |
| `guards` | errors for a module or a backward that would run in another precision than the config sets |
| `_torch` | every use of a private torch name |
"""
