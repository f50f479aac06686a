"""What surrounds the step: updates, copies of parameters, checkpoints, gradient checks."""
