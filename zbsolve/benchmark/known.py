"""known.json: published figures of the shipped instances, and the best cost and bound known of each.

Costs are upper bounds and proofs lower bounds on the same optimum, whoever found them: a cost below a known
bound, or a bound above a known cost, means that one of the two is wrong (:func:`contradictions`).
:func:`improved` never makes an entry worse. An entry of an instance that has changed since is ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from zbsolve.errors import EnvironmentFailedError
from zbsolve.files.atomic import write_json_atomically
from zbsolve.files.documents import raise_first, read_document
from zbsolve.files.models import FileModel
from zbsolve.model.instance import Instance
from zbsolve.model.objective import OBJECTIVES, Objective
from zbsolve.model.tolerances import OPTIMAL_GAP
from zbsolve.plan.certificate import Proof
from zbsolve.plan.plan import Plan

Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]

SCHEMA = "zbsolve.known/1"

# Published rates have four decimals, published costs three.
RATE_ROUNDING = 0.5e-4
COST_ROUNDING = 0.5e-3


class Best(FileModel):
    """The best known of one objective: cost and bound each with who, which version and when."""

    cost: Cost
    cost_by: str
    cost_version: str
    cost_date: str
    bound: Cost
    proof: Proof
    bound_version: str
    bound_date: str

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        """Optimal when the bound meets the cost."""
        return "optimal" if self.cost - self.bound <= OPTIMAL_GAP * self.cost else "feasible"


class Entry(FileModel):
    """Figures of one instance. ``digest`` names the instance that ``best`` is about."""

    published_bubble_by_span: dict[str, float] | None = None
    published_heuristic: dict[Objective, Cost] | None = None
    digest: str | None = None
    best: dict[Objective, Best] | None = None


class Known(FileModel):
    """The whole file."""

    schema_: Literal["zbsolve.known/1"] = Field(alias="schema")
    source: str
    instances: dict[str, Entry]

    def best(self, instance: Instance, objective: Objective) -> Best | None:
        """Best known of an instance, unless the entry is about another instance of that name."""
        entry = self.instances.get(instance.name)
        if entry is None or entry.best is None or entry.digest != digest(instance):
            return None
        return entry.best.get(objective)

    def published(self, instance: Instance, objective: Objective) -> Published | None:
        """The published cost of an instance: of the automatic heuristic, else of ZB-V."""
        entry = self.instances.get(instance.name)
        if entry is None:
            return None
        if entry.published_heuristic is not None:
            cap = instance.name.rpartition("-")[2]
            return Published(entry.published_heuristic[objective], COST_ROUNDING, f"zb-{cap}")
        rate = (entry.published_bubble_by_span or {}).get("zb-v")
        if rate is None or objective != "span":
            return None
        # rate = (cost - work) / cost; stages are equal, so any device's work will do.
        cost = instance.device_work(0) / (1 - rate)
        return Published(cost, cost * RATE_ROUNDING / (1 - rate), "zb-v")


class Published(NamedTuple):
    """A published cost, how much its printed digits leave open, and the schedule it belongs to."""

    cost: float
    rounding: float
    schedule: str


def digest(instance: Instance) -> str:
    """What tells an instance from a changed one: a hash of everything but its name and stage names."""
    data = instance.to_json_dict()
    data.pop("name", None)
    for stage in data["stages"]:
        stage.pop("name", None)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def shipped_path() -> Path:
    """The known.json of this installation."""
    entry = files("zbsolve.instances") / "known.json"
    if not isinstance(entry, Path):
        raise EnvironmentFailedError("known.json is inside an archive: name a file of your own with --known")
    return entry


def load_known(path: Path) -> Known:
    """Read and validate the file."""
    try:
        return Known.model_validate(read_document(path, SCHEMA))
    except ValidationError as error:
        raise_first(error, str(path))


def save_known(path: Path, known: Known) -> None:
    """Write the file, whole or not at all."""
    write_json_atomically(path, known.model_dump(by_alias=True, exclude_none=True))


class Claim(NamedTuple):
    """A cost or a bound that somebody states, with its origin."""

    value: float
    origin: str


def contradictions(known: Known, plan: Plan, extra: tuple[tuple[Claim, Claim], ...] = ()) -> Iterator[str]:
    """A sentence for each pair of cost and bound that cannot both be right, with both proofs.

    ``extra`` are further (cost, bound) pairs to hold against each other.
    """
    instance, objective = plan.instance, plan.objective
    where = f"{instance.name}, {objective}"
    found = Claim(plan.cost, f"found by {plan.solver.name} {plan.solver.version}")
    proven = Claim(plan.lower_bound, _proof_text(plan.bound_proof))
    pairs = list(extra)
    best = known.best(instance, objective)
    if best is not None:
        pairs.append((found, Claim(best.bound, f"known, {best.bound_date}: {_proof_text(best.proof)}")))
        pairs.append((Claim(best.cost, f"known, {best.cost_date}: found by {best.cost_by}"), proven))
    published = known.published(instance, objective)
    if published is not None:
        cost = published.cost + published.rounding
        pairs.append((Claim(cost, f"published for {published.schedule}, its rounding included"), proven))
    for cost_claim, bound_claim in pairs:
        if bound_claim.value > cost_claim.value + OPTIMAL_GAP * abs(cost_claim.value):
            yield (
                f"{where}: cost {cost_claim.value:.9g} ({cost_claim.origin}) is below the bound "
                f"{bound_claim.value:.9g} ({bound_claim.origin}): one of them is wrong"
            )


def _proof_text(proof: Proof) -> str:
    return f"{proof.method}: {proof.statement}"


def improved(known: Known, plan: Plan, date: str) -> Known:
    """``known`` with the plan's cost and bound wherever they are better than the entry's; else unchanged."""
    instance, objective, solver = plan.instance, plan.objective, plan.solver
    old = known.best(instance, objective)
    mine = Best(
        cost=plan.cost,
        cost_by=solver.name,
        cost_version=solver.version,
        cost_date=date,
        bound=plan.lower_bound,
        proof=plan.bound_proof,
        bound_version=solver.version,
        bound_date=date,
    )
    changes: dict[str, Any] = {}
    if old is None:
        new = mine
    else:
        if mine.cost < old.cost * (1 - OPTIMAL_GAP):
            changes |= {name: getattr(mine, name) for name in Best.model_fields if name.startswith("cost")}
        if mine.bound > old.bound * (1 + OPTIMAL_GAP):
            names = ("bound", "proof", "bound_version", "bound_date")
            changes |= {name: getattr(mine, name) for name in names}
        if not changes:
            return known
        new = old.model_copy(update=changes)
    entry = known.instances.get(instance.name, Entry())
    own = digest(instance)
    others = (entry.best or {}) if entry.digest == own else {}
    best = {name: b for name in OBJECTIVES if (b := {**others, objective: new}.get(name))}
    entry = entry.model_copy(update={"digest": own, "best": best})
    return known.model_copy(update={"instances": {**known.instances, instance.name: entry}})
