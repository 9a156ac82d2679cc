"""What the API takes and gives, as its documents describe it."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pyramidion.serve.limits import MOST_BEAMS, MOST_TITLE, MOST_TOKENS


class SummaryRequest(BaseModel):
    """Ask for the summary of one text."""

    model_config = ConfigDict(
        strict=True, extra="forbid", json_schema_extra={"examples": [{"text": "A long report ...", "explain": True}]}
    )

    text: str = Field(description="The text, of any length below the limit of a body.")
    title: str | None = Field(None, max_length=MOST_TITLE, description="What stands above an explanation.")
    num_beams: int | None = Field(None, ge=1, le=MOST_BEAMS, description="Beams of the search; 1 is greedy.")
    min_new_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS, description="Tokens to write at least.")
    max_new_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="Tokens to write at most.")
    explain: bool = Field(False, description="Whether to say what was kept and what each word drew on.")


class SummaryResponse(BaseModel):
    """Give a summary."""

    summary: str
    document_tokens: int = Field(description="Tokens of the text, without its end token.")
    note: str | None = Field(description="What a reader should know, such as a text longer than those trained on.")
    seconds: float = Field(description="What the writing took, for all texts that were written together.")
    explanation: dict[str, Any] | None = Field(description="As `pyramidion explain --json` writes it; null: not asked.")


class Event(BaseModel):
    """Say how far a streamed request is: one line of the answer."""

    stage: Literal["queued", "reading", "encoding", "writing", "explaining", "done", "failed"]
    ahead: int | None = Field(None, description="queued: requests before this one.")
    tokens: int | None = Field(None, description="encoding: tokens that are read; writing: tokens that are written.")
    text: str | None = Field(None, description="writing: the leading text so far; a search with beams may change it.")
    result: SummaryResponse | None = Field(None, description="done: the answer.")
    status: int | None = Field(None, description="failed: the status that an answer in one piece would have.")
    error: str | None = Field(None, description="failed: why.")


class TextResponse(BaseModel):
    """Give the text of a PDF."""

    text: str


class Health(BaseModel):
    """Say whether the server takes requests."""

    status: Literal["ok", "closing"]
    waiting: int = Field(description="Requests in the line.")
    running: int = Field(description="Requests that are being written.")


class Decoding(BaseModel):
    """Give how a summary is searched for where a request does not say."""

    num_beams: int
    min_new_tokens: int | None
    max_new_tokens: int | None


class Bounds(BaseModel):
    """Give what a request must stay below."""

    body_bytes: int
    pdf_bytes: int
    num_beams: int
    max_new_tokens: int
    queue: int
    batch_size: int
    timeout: float


class ModelCard(BaseModel):
    """Describe the model that writes."""

    name: str
    parameters: int
    device: str
    dtype: str
    hidden_size: int
    encoder_lengths: list[int] = Field(description="Representations that leave each encoder layer.")
    decoder_layers: int
    vocabulary: int
    trained_length: int = Field(description="Tokens of a text that the model is for; longer ones are read whole.")
    decoding: Decoding
    limits: Bounds
    pdf: bool = Field(description="Whether PDFs can be read.")


class Problem(BaseModel):
    """Say what is wrong: the rule and the value."""

    error: str


__all__ = [
    "Bounds",
    "Decoding",
    "Event",
    "Health",
    "ModelCard",
    "Problem",
    "SummaryRequest",
    "SummaryResponse",
    "TextResponse",
]
