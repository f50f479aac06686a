"""Models that the runtime can split into stages; what a model of one's own needs is named here."""

from zbsolve.runtime.models.pipeline_model import MicroBatch, PipelineModel, cut_rows

__all__ = ["MicroBatch", "PipelineModel", "cut_rows"]
