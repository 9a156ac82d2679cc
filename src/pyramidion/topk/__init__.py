"""Choose k of n scored vectors by a differentiable tournament: the ground floor.

Read `README.md` beside this file for the mathematics, `reference.py` for the definition, `tournament.py` for the
batched form that runs everywhere, `fused.py` for the GPU kernels, `rivals.py` for what else one might use.
"""

from pyramidion.topk.operators import hard_topk, soft_topk, straight_through_topk
from pyramidion.topk.selection import Selection

__all__ = ["Selection", "hard_topk", "soft_topk", "straight_through_topk"]
