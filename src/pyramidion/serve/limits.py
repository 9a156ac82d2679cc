"""What a server takes: how much, how many, for how long."""

from dataclasses import dataclass

MOST_BEAMS = 16
MOST_TOKENS = 2048  # that a request may ask to be written
MOST_TITLE = 300  # characters
PDF_SIZES = 8  # a PDF may be so many times as large as a text: most of it is no text
PDFS = 2  # that are read at the same time


@dataclass(frozen=True)
class Limits:
    """Say what a server takes.

    batch_size  requests with the same options that are written together at most
    queue       requests that wait at most; one more is refused
    body_bytes  of a request at most; a PDF may have 8 times as many
    timeout     seconds that a request may take, waiting included
    """

    batch_size: int = 8
    queue: int = 64
    body_bytes: int = 2_000_000
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in ("batch_size", "queue", "body_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"`timeout` must be more than 0 seconds, got {self.timeout}.")

    @property
    def pdf_bytes(self) -> int:
        """Give how large a PDF may be."""
        return PDF_SIZES * self.body_bytes


__all__ = ["MOST_BEAMS", "MOST_TITLE", "MOST_TOKENS", "PDFS", "Limits"]
