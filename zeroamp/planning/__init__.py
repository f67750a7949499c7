"""Makes a `Plan` from a model and a `Policy`: units, dtypes, groups, schedule and traffic. Changes no model."""
