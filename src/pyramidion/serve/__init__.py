"""Serve summaries over HTTP: a page, an API, a bounded line of requests, and one thread that writes."""

from pyramidion.serve.desk import Desk, Full, Order, Result
from pyramidion.serve.limits import Limits

__all__ = ["Desk", "Full", "Limits", "Order", "Result"]
