"""Keep only the representations a task needs, and learn which."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyramidion.configuration_pyramidion import PyramidionConfig
    from pyramidion.explain import Explanation
    from pyramidion.generation import Summarizer
    from pyramidion.modeling_pyramidion import (
        PyramidionEncoderModel,
        PyramidionForConditionalGeneration,
        PyramidionForSequenceClassification,
        PyramidionModel,
    )
    from pyramidion.pooling import Pooler, StridedPooler
    from pyramidion.presets import preset
    from pyramidion.scoring import (
        EmbeddingScorer,
        IndexScorer,
        LinearScorer,
        NonlinearScorer,
        PowerScorer,
        RandomScorer,
    )
    from pyramidion.topk import Selection, hard_topk, soft_topk, straight_through_topk

__version__ = "0.1.0"

__all__ = [
    "EmbeddingScorer",
    "Explanation",
    "IndexScorer",
    "LinearScorer",
    "NonlinearScorer",
    "Pooler",
    "PowerScorer",
    "PyramidionConfig",
    "PyramidionEncoderModel",
    "PyramidionForConditionalGeneration",
    "PyramidionForSequenceClassification",
    "PyramidionModel",
    "RandomScorer",
    "Selection",
    "StridedPooler",
    "Summarizer",
    "__version__",
    "hard_topk",
    "preset",
    "soft_topk",
    "straight_through_topk",
]


ROOMS = {"preset": "presets", "Summarizer": "generation", "Explanation": "explain"}


def _room(name: str) -> str:
    if name.endswith("_topk") or name == "Selection":
        return "topk"
    if name.endswith("Scorer"):
        return "scoring"
    if name.endswith("Pooler"):
        return "pooling"
    if name in ROOMS:
        return ROOMS[name]
    return "configuration_pyramidion" if name == "PyramidionConfig" else "modeling_pyramidion"


def __getattr__(name: str) -> Any:
    """Import a room when a name of it is first used: the command line answers at once, the operator without models."""
    if name not in __all__:
        raise AttributeError(f"module 'pyramidion' has no attribute {name!r}")
    return getattr(import_module(f"pyramidion.{_room(name)}"), name)


def __dir__() -> list[str]:
    return __all__
