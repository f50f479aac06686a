"""Executing one rank's program: stages, transport, lanes, and what they hold."""
