"""The portfolio under one time limit, and the re-verification of its certificates."""
