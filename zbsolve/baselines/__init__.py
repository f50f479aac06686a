"""Hand-made schedules by name. A new one costs a file in this folder and a line here."""

from zbsolve.baselines.automatic import ZB_1P, ZB_2P
from zbsolve.baselines.base import Baseline
from zbsolve.baselines.building_block import V_HALF, V_MIN
from zbsolve.baselines.dualpipe import DUALPIPE, DUALPIPE_V
from zbsolve.baselines.gpipe import GPIPE, GPIPE_R
from zbsolve.baselines.naive import NAIVE
from zbsolve.baselines.one_f_one_b import BREADTH_FIRST, INTERLEAVED, ONE_F_ONE_B, interleaved
from zbsolve.baselines.zb_v import ZB_V
from zbsolve.baselines.zero_bubble import ZB_H1, ZB_H2
from zbsolve.errors import InputError
from zbsolve.model.instance import Instance


class _Catalogue(dict[str, Baseline]):
    """Baselines by name. ``interleaved:N`` is one for every number N, made when it is asked for."""

    def __missing__(self, name: str) -> Baseline:
        group = name.removeprefix("interleaved:")
        if group == name or not group.isdecimal():
            raise KeyError(name)
        return interleaved(int(group))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            isinstance(name, str) and name.startswith("interleaved:") and name[12:].isdecimal()
        )


BASELINES: dict[str, Baseline] = _Catalogue(
    (baseline.name, baseline)
    for baseline in (
        NAIVE,
        GPIPE,
        GPIPE_R,
        ONE_F_ONE_B,
        INTERLEAVED,
        BREADTH_FIRST,
        ZB_H1,
        ZB_H2,
        ZB_1P,
        ZB_2P,
        ZB_V,
        V_HALF,
        V_MIN,
        DUALPIPE,
        DUALPIPE_V,
    )
)

__all__ = ["BASELINES", "Baseline", "applicable"]


def applicable(instance: Instance) -> list[Baseline]:
    """Baselines whose rules the instance's placement and sizes meet, whatever its memory cap."""
    result = []
    for baseline in BASELINES.values():
        try:
            baseline.prepared(instance)
        except InputError:
            continue
        result.append(baseline)
    return result
