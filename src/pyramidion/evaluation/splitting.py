"""Split English text into sentences: pysbd for what is as long as a summary, one plain rule for what is longer.

pysbd compiles expressions for every abbreviation it meets and is quadratic in the length of a line: an article of 7,000
words takes it 0.4 s of a core, one in a single line 1.6 s, the rule 5 ms. On 30 articles of eLife the rule finds 94 %
of pysbd's sentences, and 96 % of what it finds is pysbd's.
"""

import re
from functools import cache
from typing import Any

LONG = 8_000  # characters: beyond, the rule
END = re.compile(
    r"""[.!?]+["'”’)\]]*(?=\s+["'“‘(\[@]*[^\W_a-z])"""  # before a capital, a digit or a script without capitals
    r"""|(?<=\s)[.!?](?=\s)|[。！？]+["'”’)\]]*|\n+"""  # tokens parted by spaces; marks that no space follows; lines
)
SHORT = "[a-z]|al|approx|ca|cf|dr|e\\.g|eqs?|etc|figs?|i\\.e|mrs?|ms|prof|refs?|resp|sec|st|vs|viz"
ABBREVIATED = re.compile(rf"(?:^|[\s(\[])(?:{SHORT})\.$", re.IGNORECASE)


@cache
def _segmenter() -> Any:
    import pysbd

    return pysbd.Segmenter(language="en", clean=False)


def sentences(text: str) -> list[str]:
    """Split a text into sentences without the white space between them; nothing else is lost."""
    found = by_rule(text) if len(text) > LONG else _segmenter().segment(text)
    if "".join(found).split() != text.split():  # pysbd loses what it takes for marks of its own
        found = by_rule(text)
    return [sentence for sentence in map(str.strip, found) if sentence]


def by_rule(text: str) -> list[str]:
    """Split at lines, and behind an end mark before a capital, unless it ends an abbreviation or an initial."""
    found, start = [], 0
    for match in END.finditer(text):
        if not ABBREVIATED.search(text, max(start, match.end() - 12), match.end()):
            found.append(text[start : match.end()])
            start = match.end()
    return [*found, text[start:]]


__all__ = ["by_rule", "sentences"]
