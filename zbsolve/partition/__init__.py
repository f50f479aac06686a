"""From layers to stages on devices: splits by time alone, and the joint decision with its certificate."""

from zbsolve.partition.layers import Keep, Layer, LayerProfile, load_layers
from zbsolve.partition.problem import Decision, DecisionProblem
from zbsolve.partition.splits import balanced_split, even_split, imbalance, stage_loads

__all__ = [
    "Decision",
    "DecisionProblem",
    "Keep",
    "Layer",
    "LayerProfile",
    "balanced_split",
    "even_split",
    "imbalance",
    "load_layers",
    "stage_loads",
]
