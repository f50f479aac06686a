"""Running a sweep: on this machine's cores (joblib), or on a Ray cluster.

Workers compute and the one process that was started writes: a worker that dies loses only what it was
at. Results arrive in any order and are the same in every order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zbsolve.errors import EnvironmentFailedError
from zbsolve.sweep.grid import Config, Inputs, Outcome, evaluate
from zbsolve.sweep.store import Store

log = logging.getLogger(__name__)

Result = tuple[Config, Outcome, float]


@dataclass(frozen=True, slots=True)
class Swept:
    """All results of a sweep, in the grid's order, and how many of them were there before."""

    rows: tuple[Result, ...]
    found_before: int

    @property
    def computed(self) -> int:
        return len(self.rows) - self.found_before


def timed(inputs: Inputs, config: Config) -> Result:
    """One configuration, its result, and the seconds it took."""
    began = time.perf_counter()
    outcome = evaluate(inputs, config)
    return config, outcome, time.perf_counter() - began


def run_sweep(
    inputs: Inputs,
    configs: Sequence[Config],
    store: Store,
    *,
    jobs: int = 1,
    ray: str | None = None,
    progress: Callable[[int, int, Config], None] | None = None,
) -> Swept:
    """Compute what the store does not have yet.

    Parameters
    ----------
    jobs : int
        Processes on this machine (1: this one).
    ray : str, optional
        Address of a Ray cluster ("local" starts one here); its nodes need this package.
    progress : callable, optional
        Told after each result how many are done, of how many, and which it was.

    Raises
    ------
    EnvironmentFailedError
        Ray is not installed or cannot be reached.
    """
    keys = [inputs.key(config) for config in configs]
    before = store.get(keys)
    missing = [config for config, key in zip(configs, keys, strict=True) if key not in before]
    done = len(before)
    workers = _on_ray(inputs, missing, ray) if ray is not None else _here(inputs, missing, jobs)
    for config, outcome, seconds in workers:
        store.add(inputs.key(config), config, outcome, seconds)
        done += 1
        if progress is not None:
            progress(done, len(configs), config)
    found = store.get(keys)
    rows = tuple((config, *found[key]) for config, key in zip(configs, keys, strict=True))
    return Swept(rows, len(before))


def _here(inputs: Inputs, configs: Sequence[Config], jobs: int) -> Iterator[Result]:
    if jobs == 1 or len(configs) < 2:
        yield from (timed(inputs, config) for config in configs)
        return
    from joblib import Parallel, delayed

    parallel = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
    yield from parallel(delayed(timed)(inputs, config) for config in configs)


def _on_ray(inputs: Inputs, configs: Sequence[Config], address: str) -> Iterator[Result]:
    try:
        import ray
    except ImportError as error:
        raise EnvironmentFailedError(
            f'{error.name or "ray"} is not installed: pip install "zbsolve[ray]"'
        ) from None
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, include_dashboard=False)
    except Exception as error:  # noqa: BLE001  Ray raises whatever its transport does
        reason = " ".join(str(error).split())[:200]
        raise EnvironmentFailedError(
            f"--ray {address}: cannot be reached ({reason}): start a cluster or use local"
        ) from None
    try:
        shared = ray.put(inputs)
        remote = ray.remote(timed)
        waiting = [remote.remote(shared, config) for config in configs]
        while waiting:
            ready, waiting = ray.wait(waiting)
            yield from ray.get(ready)
    finally:
        ray.shutdown()
