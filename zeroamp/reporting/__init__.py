"""Records of optimizer steps, monitors, warnings, a progress line, profiles, and tables that compare runs."""
