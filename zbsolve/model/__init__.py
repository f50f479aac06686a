"""What a step is: the instance, its tasks and memory, schedules, their timing and their judge."""
