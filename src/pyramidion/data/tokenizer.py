"""Tokens: train a tokenizer or take one, and encode with it several times faster than it does by itself.

`tokenizers` encodes about 1.5 MB/s of English on one core of the machine this was measured on. The words of a corpus
repeat, and looking them up is several times faster. The tokenizer still decides everything: it encodes each word once.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # ids 0 to 3
SMALLEST = 256 + len(SPECIAL)
REMEMBERED = 1 << 20  # pieces: about 150 MB
LONGEST = 64  # bytes of a piece that is remembered


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE: any text can be encoded, and decoding gives it back to the byte.

    A special token that is written out in a text is text: "</s>" in a document is five characters and no end.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, split_special_tokens=True, clean_up_tokenization_spaces=False, **SPECIAL
    )


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """Take a tokenizer: a folder, a `tokenizer.json`, or a name that transformers knows. It must have pad and end."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if Path(path).is_file():
            beside = Path(path).with_name("tokenizer_config.json").is_file()
            if beside:
                return load_tokenizer(str(Path(path).parent))
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=path, **_usual(path))
        else:
            tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # a hub, a broken file: whatever it raises means that there is no tokenizer
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"`--tokenizer` must be a folder or name that transformers loads, got {path!r}: {reason}"
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"`--tokenizer` must be a fast tokenizer, got {type(tokenizer).__name__}.")
    if tokenizer.pad_token_id is None or tokenizer.eos_token_id is None:
        raise ValueError(f"`--tokenizer` must have a padding and an end token, which {path!r} lacks.")
    return tokenizer


def _usual(path: str) -> dict[str, str]:
    """Name the special tokens of a bare tokenizer.json, as far as it has the usual ones."""
    added = {token["content"] for token in json.loads(Path(path).read_text())["added_tokens"]}
    return {role: token for role, token in SPECIAL.items() if token in added}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Choose the smallest integer that holds every id."""
    return np.dtype("<u2" if vocab_size < 65536 else "<u4")


# --------------------------------------------------------------------------------------------------------------------
# Encoding
# --------------------------------------------------------------------------------------------------------------------


class Encoder:
    """Encode texts as the tokenizer does, without special tokens.

    Byte-level BPE splits a text by GPT-2's pattern before anything else, and never merges across. Where a text is
    surely split, whatever stands before or behind, it may be cut first, and encoding the pieces is encoding the text:
    `_cuts` finds such places. Pieces repeat: each is encoded once, many at a time, and from then on looked up.
    A tokenizer of another kind is given the text as it is.
    """

    def __init__(self, tokenizer: str, dtype: np.dtype[Any]) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(tokenizer)
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.dtype = dtype
        self.by_pieces = is_byte_level(json.loads(tokenizer))
        self.newline = self.tokenizer.token_to_id("Ċ")
        self.pieces: dict[bytes, bytes] = {}

    def encode(self, texts: Sequence[bytes]) -> tuple[bytes, np.ndarray]:
        """Encode texts of UTF-8: the ids of all of them one behind the other, and how many each has."""
        if not self.by_pieces:
            encoded = self._plain(texts)
            return b"".join(encoded), np.array([len(ids) for ids in encoded]) // self.dtype.itemsize
        import pyarrow

        data = b"\0".join([*texts, b""])  # behind each text a byte that is next to no cut
        ends = np.cumsum([len(text) + 1 for text in texts])
        cuts = _cuts(data, ends)
        offsets = pyarrow.py_buffer(cuts.astype(np.int64))
        buffers = [None, offsets, pyarrow.py_buffer(data)]
        found = pyarrow.LargeBinaryArray.from_buffers(
            pyarrow.large_binary(), len(cuts) - 1, buffers
        ).dictionary_encode()
        which = found.indices.to_numpy().astype(np.int64)  # which of the pieces that differ stands at each place
        table = [*self._looked_up(found.dictionary.to_pylist()), b""]
        behind = np.searchsorted(cuts, ends - 1)
        which[behind] = len(table) - 1
        return self._spread(table, which, np.concatenate([[0], behind + 1]))

    def _plain(self, texts: Sequence[bytes]) -> list[bytes]:
        found = self.tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(one.ids, dtype=self.dtype).tobytes() for one in found]

    def _spread(self, table: list[bytes], which: np.ndarray, starts: np.ndarray) -> tuple[bytes, np.ndarray]:
        """Write out `table[i] for i in which` in one go, and count the ids from each start to the next."""
        sizes = np.fromiter(map(len, table), np.int64, len(table)) // self.dtype.itemsize
        begins = np.cumsum(sizes) - sizes  # of each piece in the table
        counts = sizes[which]
        ends = np.concatenate([[0], np.cumsum(counts)])  # of each piece in the result
        places = np.repeat(begins[which] - ends[:-1], counts) + np.arange(ends[-1])
        ids = np.frombuffer(b"".join(table), dtype=self.dtype)[places]
        return ids.tobytes(), np.diff(ends[starts])

    def _looked_up(self, pieces: list[bytes]) -> list[bytes]:
        """Look up pieces, all of them different, and encode those that are new."""
        if len(self.pieces) > REMEMBERED:
            self.pieces.clear()
        known = list(map(self.pieces.get, pieces))
        new = [piece for piece, ids in zip(pieces, known, strict=True) if ids is None]
        fresh = dict(self._encoded(new))
        self.pieces |= {piece: ids for piece, ids in fresh.items() if len(piece) <= LONGEST}
        return [fresh[piece] if ids is None else ids for piece, ids in zip(pieces, known, strict=True)]

    def _encoded(self, pieces: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Encode pieces without white space as the lines of one text, which is faster, and the others one by one."""
        simple: list[bytes] = []
        others: list[bytes] = []
        for piece in pieces:
            (simple if ASCII.fullmatch(piece) or _is_line(piece.decode()) else others).append(piece)
        ids = np.frombuffer(self._plain([b"\n".join(simple)])[0], self.dtype)
        breaks = np.flatnonzero(ids == self.newline) if self.newline is not None else np.empty(0, np.int64)
        if simple and len(breaks) == len(simple) - 1:
            begins = np.concatenate([[0], breaks + 1]) * self.dtype.itemsize
            stops = np.append(breaks, len(ids)) * self.dtype.itemsize
            spans = zip(begins.tolist(), stops.tolist(), strict=True)
            data = ids.tobytes()
            yield from ((piece, data[i:j]) for piece, (i, j) in zip(simple, spans, strict=True))
        else:
            others = pieces
        yield from zip(others, self._plain(others), strict=True)


def _is_line(text: str) -> bool:
    """Tell whether a newline in front of a text, or behind it, is split from it."""
    sign = text.removeprefix(" ")
    return sign != "" and not sign[0].isspace() and not sign[-1].isspace() and "\n" not in sign


def _cuts(data: bytes, ends: np.ndarray) -> np.ndarray:
    """Find where texts may be cut, in bytes; each of them ends in one extra byte, which becomes a piece of its own.

    GPT-2's pattern goes from left to right and never looks back. Its alternatives are runs of letters, of digits, and
    of other signs, each with one space in front, runs of white space, which leave the last space to a word behind, and
    endings like 's. So it always splits before a space that a sign follows, and between signs of different kinds,
    unless the first is an apostrophe. Beyond ASCII nothing is cut: kinds depend on the version of Unicode.
    """
    before, behind = np.frombuffer(data.translate(BEFORE), np.uint8), np.frombuffer(data.translate(BEHIND), np.uint8)
    cut = np.zeros(len(data) + 1, dtype=bool)
    cut[1:-1] = (before[:-1] != behind[1:]) & (before[:-1] != 0) & (behind[1:] != 0)
    word = np.frombuffer(data.translate(WORD), np.uint8)
    cut[: len(data) - 1] |= (np.frombuffer(data, np.uint8)[:-1] == ord(" ")) & (word[1:] != 0)
    cut[0] = True
    cut[ends] = True
    cut[ends - 1] = True
    return np.flatnonzero(cut)


def _kinds(**kinds: str) -> bytes:
    """Make a table for `bytes.translate`: 1, 2, ... for the signs of each kind, 0 for all others."""
    table = bytearray(256)
    for number, signs in enumerate(kinds.values(), start=1):
        for sign in signs.encode("latin-1"):
            table[sign] = number
    return bytes(table)


SIGNS = string.punctuation.replace("'", "")
BEFORE = _kinds(letter=string.ascii_letters, digit=string.digits, sign=SIGNS)
BEHIND = _kinds(letter=string.ascii_letters, digit=string.digits, sign=string.punctuation, space="\t\n\v\f\r")
# A sign that is surely no white space, by its first byte in UTF-8: those of other white space are C2, E1, E2 and E3.
FIRST = "".join(map(chr, {*range(0xC3, 0xF5)} - {0xE1, 0xE2, 0xE3}))
WORD = _kinds(sign=string.ascii_letters + string.digits + string.punctuation + FIRST)
ASCII = re.compile(rb" ?[!-~]+")


def is_byte_level(tokenizer: dict[str, Any]) -> bool:
    """Tell whether a tokenizer.json is plain byte-level BPE, for which a text may be cut before its words."""
    pre, model = tokenizer["pre_tokenizer"] or {}, tokenizer["model"]
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        tokenizer["normalizer"] is None
        and pre.get("type") == "ByteLevel"
        and not pre["add_prefix_space"]
        and pre.get("use_regex", True)
        and model["type"] == "BPE"
        and not any(model.get(key) for key in odd)
        and all(token["special"] for token in tokenizer["added_tokens"])
    )
