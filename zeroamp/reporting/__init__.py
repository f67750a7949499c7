"""Records of optimizer steps, profiles, tables and pages."""
