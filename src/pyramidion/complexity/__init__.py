"""Operations and memory, counted: what a configuration costs, what fits, and what the paper says about it.

    cost = count(preset("deep-pyramidion"), length=8192, target=512)
    print(cost.of("encoder self-attention").multiplications)

Read `sizes.py` first, then `multiplications.py` and `activations.py`: one function for each part of the model.
"""

from pyramidion.complexity.claims import Claim, claims
from pyramidion.complexity.cost import PARTS, Cost, Generation, Row, count, count_generation
from pyramidion.complexity.fitting import Fit, Suggestion, fit, longest_document
from pyramidion.complexity.need import Need, parse_memory, training_need
from pyramidion.complexity.parameters import parameters
from pyramidion.complexity.table import Sizes, TableRow, table

__all__ = [
    "PARTS",
    "Claim",
    "Cost",
    "Fit",
    "Generation",
    "Need",
    "Row",
    "Sizes",
    "Suggestion",
    "TableRow",
    "claims",
    "count",
    "count_generation",
    "fit",
    "longest_document",
    "parameters",
    "parse_memory",
    "table",
    "training_need",
]
