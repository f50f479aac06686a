"""What a run measured, beside what the plan predicted."""
