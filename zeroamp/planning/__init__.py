"""From a model and a `Policy` to a `Plan`: units, precision of each parameter, groups, schedule, traffic. Pure."""
