"""Keep only the representations a task needs, and learn which."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyramidion.topk import Selection, hard_topk, soft_topk, straight_through_topk

__version__ = "0.1.0"

__all__ = ["Selection", "__version__", "hard_topk", "soft_topk", "straight_through_topk"]


def __getattr__(name: str) -> Any:
    """Import torch when a name is first used, so that the command line answers at once."""
    if name not in __all__:
        raise AttributeError(f"module 'pyramidion' has no attribute {name!r}")
    from pyramidion import topk

    return getattr(topk, name)


def __dir__() -> list[str]:
    return __all__
