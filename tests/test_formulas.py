"""Published closed forms against the simulator, and the worked numbers of the planning literature."""

from __future__ import annotations

import pytest

from zbsolve.baselines import BASELINES
from zbsolve.baselines.formulas import FORMULAS, Sizes, by_formula, simulated, verified

TIMES = ((1.0, 1.0, 1.0), (3.0, 4.0, 2.0), (2.0, 2.5, 0.5))


def test_every_schedule_of_the_catalogue_has_a_formula() -> None:
    """No baseline is without its bubble, peak and hops."""
    assert FORMULAS.keys() == BASELINES.keys()


def grid(name: str) -> list[Sizes]:
    """Sizes at which the formula holds."""
    loop = BASELINES[name].placement == "loop"
    sizes = [
        Sizes(p, m, v, t_f=t_f, t_b=t_b, t_w=t_w, mem_r=0.125)
        for p in (1, 2, 3, 4, 8)
        for m in (1, 3, 4, 8, 12, 16, 32)
        for v in ((2, 3) if loop else (1,))
        for t_f, t_b, t_w in TIMES
    ]
    return [each for each in sizes if FORMULAS[name].holds(each)]


@pytest.mark.parametrize("name", FORMULAS)
def test_simulation_equals_the_formula(name: str) -> None:
    """Bubble, peak and hops over a grid of p, m, v and times."""
    cells = grid(name)
    assert len(cells) >= 4
    wrong = [
        (each, simulated(name, each), by_formula(name, each)) for each in cells if not verified(name, each)
    ]
    assert wrong == []


@pytest.mark.parametrize("n", [4, 6, 8, 12, 24])
def test_interleaving_from_depth_first_to_breadth_first(n: int) -> None:
    """p = 4, m = 24, v = 2: N from p to m keeps the bubble, 3 (1 + 2), and holds 2 * 3 + N + 1 chunks."""
    sizes = Sizes(4, 24, 2, n=n)
    assert simulated("interleaved", sizes) == (9.0, 7.0 + n, 7)
    assert verified("interleaved", sizes)


def test_a_wrong_formula_would_be_found() -> None:
    """Outside of where it holds DualPipe's formula is off, and says nothing: F&B = 2.5 gives 3.5, not 4.5."""
    sizes = Sizes(8, 20, t_fb=2.5)
    assert verified("dualpipe", sizes) is None
    assert by_formula("dualpipe", sizes).bubble == 4.5
    assert simulated("dualpipe", sizes).bubble == 3.5


@pytest.mark.parametrize(("m", "r"), [(8, 0.875), (32, 0.22), (64, 0.11)])
def test_gpipe_bubble_over_ideal_time(m: int, r: float) -> None:
    """p = 8: r_bubble = (p - 1) / m = 7/8, 7/32, 7/64."""
    for name in ("gpipe", "1f1b"):
        bubble = simulated(name, Sizes(8, m)).bubble
        assert round(bubble / (3 * m), 2 if m > 8 else 3) == r


def test_naive_bubble_over_ideal_time() -> None:
    """r_bubble = p - 1."""
    assert simulated("naive", Sizes(4, 6)).bubble / (3 * 6) == 3


def test_interleaved_peak_in_whole_stages() -> None:
    """p = 4, v = 2: p + (p - 1) / v = 5.5 stage activations on device 0."""
    assert simulated("interleaved", Sizes(4, 8, 2)).peak / 2 == 5.5


def test_zb_h1_has_a_third_of_the_bubble_of_1f1b() -> None:
    """Equal times: (p - 1) 1 against (p - 1) 3."""
    assert simulated("zb-h1", Sizes(4, 8)).bubble * 3 == simulated("1f1b", Sizes(4, 8)).bubble


def test_zb_h2_has_no_bubble_in_span() -> None:
    """Equal times: (p - 1)(1 + 1 - 2) = 0, with 2p - 1 activations."""
    assert simulated("zb-h2", Sizes(4, 8)) == (0.0, 7.0, 3)
