"""Take texts as they come: bytes, control characters, halves of emoji. What cannot be used is said, not raised."""

import codecs
import re
import unicodedata
from dataclasses import dataclass

SURROGATE = re.compile("[\ud800-\udfff]")
CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x9f]")  # not the white space, not the escape of coloured text
FEW_CONTROLS = 3
INVISIBLE = {"Cc", "Cf", "Cs", "Zs", "Zl", "Zp"}
MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


@dataclass(frozen=True)
class Unusable:
    """Stand in the place of a text that there is none of, with the reason."""

    reason: str


def decode(data: bytes) -> str | Unusable:
    """Read bytes as UTF-8, or as UTF-16 where they begin with its mark."""
    encoding = next((name for mark, name in MARKS if data.startswith(mark)), "utf-8")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        return Unusable(f"not a text: byte {error.start} is not {encoding.removesuffix('-sig').upper()}")


def usable(text: str | bytes) -> tuple[str, str | None] | Unusable:
    """Give the text as a model can read it, with a note on what was changed, or say why there is nothing to read.

    Halves of surrogate pairs become U+FFFD. Control characters stay, NUL too, unless there are so many (over a tenth,
    and more than three) that this is no text.
    """
    if isinstance(text, bytes):
        decoded = decode(text)
        if isinstance(decoded, Unusable):
            return decoded
        text = decoded
    text, halves = SURROGATE.subn("\ufffd", text)
    controls = len(CONTROL.findall(text))
    if controls > max(FEW_CONTROLS, len(text) / 10):
        return Unusable(f"not a text: {controls:,} of {len(text):,} characters are control characters")
    if all(unicodedata.category(character) in INVISIBLE for character in text):
        return Unusable("empty" if not text.strip() else "empty: no visible character")
    return text, f"{halves:,} lone surrogates replaced" if halves else None


__all__ = ["Unusable", "decode", "usable"]
