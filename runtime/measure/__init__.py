"""Profiles of a model and the runtime's own cost."""
