"""Records of optimizer steps, monitors, warnings, profiles, and tables that compare runs."""
