"""Hand-made schedules by name. A new one costs a file in this folder and a line here."""

from zbsolve.baselines.automatic import ZB_1P, ZB_2P
from zbsolve.baselines.base import Baseline
from zbsolve.baselines.building_block import V_HALF, V_MIN
from zbsolve.baselines.gpipe import GPIPE
from zbsolve.baselines.one_f_one_b import INTERLEAVED, ONE_F_ONE_B
from zbsolve.baselines.zb_v import ZB_V
from zbsolve.baselines.zero_bubble import ZB_H1, ZB_H2
from zbsolve.errors import InputError
from zbsolve.instance import Instance

BASELINES: dict[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        GPIPE,
        ONE_F_ONE_B,
        INTERLEAVED,
        ZB_H1,
        ZB_H2,
        ZB_1P,
        ZB_2P,
        ZB_V,
        V_HALF,
        V_MIN,
    )
}

__all__ = ["BASELINES", "Baseline", "applicable"]


def applicable(instance: Instance) -> list[Baseline]:
    """Baselines whose rules the instance's placement and sizes meet, whatever its memory cap."""
    result = []
    for baseline in BASELINES.values():
        try:
            baseline.orders(instance.with_fused_backward() if baseline.fused else instance)
        except InputError:
            continue
        result.append(baseline)
    return result
