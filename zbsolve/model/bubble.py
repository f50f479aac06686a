"""How long devices work, and what share of a cost is bubble."""

from __future__ import annotations

from zbsolve.model.schedule import Schedule


def busy_time(schedule: Schedule) -> float:
    """Time that devices spend on tasks, summed over devices; an F&B pair counts once."""
    return sum(busy_times(schedule))


def busy_times(schedule: Schedule) -> list[float]:
    """Time that each device spends on tasks; an F&B pair counts once."""
    seconds = {backward for _, backward in schedule.pairs}
    return [
        sum(timed.end - timed.start for timed in program if timed.task not in seconds)
        for program in schedule.devices
    ]


def bubble_rate(schedule: Schedule, cost: float) -> float:
    """``1 - work/cost``, work being the mean busy time of a device; say which cost where it is shown."""
    if cost <= 0:
        return 0.0
    return max(0.0, 1.0 - busy_time(schedule) / (len(schedule.devices) * cost))
