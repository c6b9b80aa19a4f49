"""One model, several processes: a long row of tokens is cut among them and every answer stays that of one process."""

from tidegate.parallel.handle import SequenceParallel, sequence_parallel
from tidegate.parallel.plan import SpPlan
from tidegate.parallel.whole import gather, gather_loss_tensors

__all__ = ["SequenceParallel", "SpPlan", "gather", "gather_loss_tensors", "sequence_parallel"]
