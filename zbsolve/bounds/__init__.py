"""Proven lower bounds."""
