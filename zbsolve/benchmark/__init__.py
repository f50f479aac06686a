"""Suites of instances against published figures and the best known."""
