"""Exact models, and the only importers of pulp and ortools: MILP, CP-SAT, lags, periodic schedules."""
