"""Ranks of torch's own pipelining runtime, for the cross-check: run as a script, not collected as a test.

    python torch_ranks.py SCHEDULE.csv GRAMMAR STAGES_OF_RANKS MICROBATCHES OUT

One process loads torch and forks a rank for each entry of STAGES_OF_RANKS (``0,3;1,2``). Each writes the
gradients of its stages to OUT/<stage>.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

sys.path.insert(0, str(Path(__file__).parent))


def run_rank(rank: int, csv: str, grammar: str, held: list[list[int]], count: int, out: Path) -> None:
    """One rank: its stages, torch's runtime on the CSV, one step, gradients to files."""
    import runtime_cases as cases

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(out / "store"), len(held)), rank=rank, world_size=len(held)
    )
    torch.manual_seed(0)
    model = cases.eight_linear()
    total = sum(map(len, held))
    per_stage = len(model.layers) // total
    batches = model.microbatches(0, count)
    x = torch.cat([batch.inputs for batch in batches])
    y = torch.cat([batch.targets for batch in batches])
    example = batches[0].inputs
    stages = [
        PipelineStage(
            torch.nn.Sequential(*model.layers[s * per_stage : (s + 1) * per_stage]),
            s,
            total,
            torch.device("cpu"),
            input_args=(example.clone().requires_grad_(s > 0),),
            output_args=(example.clone().requires_grad_(),),
        )
        for s in held[rank]
    ]
    schedule = _PipelineScheduleRuntime(stages, count, loss_fn=model.loss)  # type: ignore[no-untyped-call]
    schedule._load_csv(csv, format=grammar)
    arguments = (x,) if 0 in held[rank] else ()
    schedule.step(*arguments, target=y if total - 1 in held[rank] else None)
    for stage in stages:
        grads = [p.grad for p in stage.submod.parameters()]
        torch.save(grads, out / f"{stage.stage_index}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(csv: str, grammar: str, layout: str, count: str, folder: str) -> int:
    """Fork the ranks and wait for them."""
    held = [[int(s) for s in part.split(",")] for part in layout.split(";")]
    children = []
    for rank in range(len(held)):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run_rank(rank, csv, grammar, held, int(count), Path(folder))
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
