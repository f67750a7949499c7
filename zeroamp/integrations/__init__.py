"""Integrations with other training libraries. A library is needed only if its module here is imported."""
