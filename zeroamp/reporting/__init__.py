"""What a run says of itself: records of its steps, monitors, warnings, a progress line, and tables of several runs."""
