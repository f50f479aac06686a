"""Processes: launching ranks, watching them, gathering what they measured."""
