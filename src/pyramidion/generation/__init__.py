"""Write about long documents: decoding settings, texts that may be anything, batches by length, results in order."""

from pyramidion.generation.decoding import decoding_defaults, decoding_options
from pyramidion.generation.summarizer import Summarizer, Summary
from pyramidion.generation.texts import Unusable

__all__ = ["Summarizer", "Summary", "Unusable", "decoding_defaults", "decoding_options"]
