"""Split backwards: input gradient now, weight gradient later."""
