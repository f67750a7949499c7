"""What is attached to a module or to a collective.

| package | what |
|---|---|
| `collectives` | the all-gather and the reduce-scatter of one group, accumulation, counted traffic |
| `precision` | autocast around the root's forward, modules kept in fp32, shared casts |
| `tracing` | runs on fake tensors: which ops use which parameters |
| `observers` | ranges in traces, exposed communication, the dtypes that occur |
| `typed_groups` | further FSDP2 groups of a unit, one per dtype |
| `guards` | errors for a backward or a module that would compute in another precision than asked |
| `_torch` | every private name of torch |
"""
