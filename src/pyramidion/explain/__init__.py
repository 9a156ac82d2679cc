"""Say what a model kept of a text, and what each word of its summary drew on: numbers, a page, a terminal."""

from pyramidion.explain.account import Copies, Explanation, Passage, Stage
from pyramidion.explain.browser import page
from pyramidion.explain.reading import explain

__all__ = ["Copies", "Explanation", "Passage", "Stage", "explain", "page"]
