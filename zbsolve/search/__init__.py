"""Heuristic searches for schedules."""
