"""The collectives of a parameter group (all-gather, reduction), gradient accumulation, and traffic counters."""
