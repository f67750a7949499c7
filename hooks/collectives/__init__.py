"""The collectives of a parameter group (all-gather, reduction), and traffic counters."""
