"""A model by its name: the one that ships, or a factory of the user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from zbsolve.errors import InputError
from zbsolve.runtime.models.gpt import GPT
from zbsolve.runtime.models.pipeline_model import PipelineModel


def load_model(name: str, seed: int) -> PipelineModel:
    """Build ``gpt`` or ``package.module:factory`` (called without arguments) after seeding torch.

    Raises
    ------
    InputError
        When the name cannot be imported or what it returns is not a :class:`PipelineModel`.
    """
    factory: Callable[[], Any]
    if name == "gpt":
        factory = GPT
    else:
        module, _, attribute = name.partition(":")
        if not module or not attribute:
            raise InputError(f"--model {name}: give gpt, or package.module:factory")
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise InputError(f"--model {name}: {error}: give an importable package.module:factory") from None
    torch.manual_seed(seed)
    model = factory()
    if not isinstance(model, PipelineModel):
        raise InputError(
            f"--model {name}: it returned a {type(model).__name__} without layers, loss and microbatches: "
            "return a zbsolve.runtime.models.pipeline_model.PipelineModel"
        )
    return model
