"""Gives some modules other dtypes than their mode does: `zeroamp.overrides` and `keep_in_fp32_modules`."""
