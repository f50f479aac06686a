"""What torch finds on this machine, as one JSON object on stdout: ``python -m
zbsolve.runtime.measure.describe``.

Run in a process of its own by ``zbsolve doctor``, so that a broken torch or driver cannot take the caller
down. It looks, and computes nothing.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist


def describe() -> dict[str, object]:
    """Version, transports and GPUs."""
    available = torch.cuda.is_available()
    names = (
        [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())] if available else []
    )
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in names],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe()) + "\n")
