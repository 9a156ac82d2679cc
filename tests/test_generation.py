"""Summaries of any input: in order, the same in any batch, never a traceback; and a command that survives a kill."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from pyramidion.cli import main
from pyramidion.generation import Summarizer, Summary, Unusable, decoding_defaults, decoding_options
from pyramidion.generation.documents import documents
from pyramidion.generation.engine import generate
from pyramidion.generation.journal import Journal, read_rows, to_line
from pyramidion.generation.summarizer import WINDOW, batches
from pyramidion.generation.texts import decode, usable
from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration
from pyramidion.presets import preset

VOCABULARY = 300
WORDS = ["the", "of", "pooling", "keeps", "tokens", "that", "a", "task", "needs", "long", "documents", "in", "many"]
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


# --------------------------------------------------------------------------------------------------------------------
# A small model
# --------------------------------------------------------------------------------------------------------------------


def make_text(seed: int, words: int) -> str:
    """Draw words at random: no two documents alike."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) + chosen.choice(["", "", "s", ".", ","]) for _ in range(words))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train byte-level BPE on a few words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([make_text(seed, 100) for seed in range(20)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **SPECIAL)


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a folder as training does: a random model that minds its input, and settings for short summaries."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, **changes}
    model = PyramidionForConditionalGeneration(preset("tiny-pyramidion", **sizes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "attention" in name and weight.ndim == 2:
                weight.mul_(2)
    for name, value in {"num_beams": 2, "min_new_tokens": 3, "max_new_tokens": 9, "no_repeat_ngram_size": 2}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def summarizer(model: Path) -> Summarizer:
    return Summarizer.from_pretrained(model, device="cpu")


TEXTS = [make_text(seed, random.Random(seed).randint(5, 200)) for seed in range(21)]


@pytest.fixture(scope="module")
def alone(summarizer: Summarizer) -> list[Summary]:
    """Summarise each text by itself, with nothing of ours but the tokenizer and the model."""
    results = []
    for text in TEXTS:
        ids = [*summarizer.tokenizer(text, add_special_tokens=False)["input_ids"], 2]
        written = summarizer.model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)))
        results.append(Summary(summarizer.tokenizer.decode(written[0], skip_special_tokens=True).strip(), len(ids) - 1))
    return results


# --------------------------------------------------------------------------------------------------------------------
# Decoding settings
# --------------------------------------------------------------------------------------------------------------------


def test_the_papers_settings():
    shared = {"length_penalty": 1.0, "min_new_tokens": 72, "max_new_tokens": 966}
    assert decoding_defaults(preset("deep-pyramidion")) == {"num_beams": 2, **shared}
    assert decoding_defaults(preset("row-24")) == {"num_beams": 8, **shared}


def test_options_go_over_the_folder_and_that_over_the_paper():
    config = preset("deep-pyramidion")
    saved = GenerationConfig(num_beams=5, max_new_tokens=300, pad_token_id=0)
    chosen = decoding_options(config, saved, num_beams=3, min_new_tokens=None)
    assert (chosen.num_beams, chosen.max_new_tokens, chosen.min_new_tokens) == (3, 300, 72)
    assert (chosen.length_penalty, chosen.pad_token_id) == (1.0, 0)


def test_a_limit_has_two_names_and_the_last_word_counts():
    config = preset("deep-pyramidion")
    chosen = decoding_options(config, GenerationConfig(max_length=50, min_length=10))
    assert (chosen.max_length, chosen.max_new_tokens, chosen.min_length, chosen.min_new_tokens) == (50, None, 10, None)
    chosen = decoding_options(config, GenerationConfig(max_length=50), max_new_tokens=80)
    assert (chosen.max_length, chosen.max_new_tokens) == (None, 80)


def test_a_minimum_that_nobody_asked_for_gives_way():
    chosen = decoding_options(preset("deep-pyramidion"), None, max_new_tokens=20)
    assert (chosen.min_new_tokens, chosen.max_new_tokens) == (20, 20)
    with pytest.raises(ValueError, match="`min_new_tokens` must be at most `max_new_tokens`, which is 20, got 21"):
        decoding_options(preset("deep-pyramidion"), None, max_new_tokens=20, min_new_tokens=21)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_baems": 2}, "Did you mean `num_beams`"),
        ({"num_beams": 0}, "`num_beams` must be a whole number of at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "at least 1, got 2.5"),
        ({"num_return_sequences": 2}, "one summary"),
    ],
)
def test_a_wrong_option_is_refused_before_any_work(summarizer: Summarizer, wrong: dict[str, Any], said: str):
    def never() -> Iterator[str]:
        raise AssertionError("a text was asked for")
        yield ""

    with pytest.raises(ValueError, match=said):
        summarizer.stream(never(), **wrong)


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"max_length": 1}, {"skip": -1}])
def test_wrong_sizes_are_refused(summarizer: Summarizer, wrong: dict[str, Any]):
    with pytest.raises(ValueError, match="must be at least"):
        summarizer.stream([], **wrong)


def test_one_text_is_not_several(summarizer: Summarizer):
    with pytest.raises(ValueError, match="put it into a list"):
        summarizer("one text")


# --------------------------------------------------------------------------------------------------------------------
# Batches and order
# --------------------------------------------------------------------------------------------------------------------


def test_like_lengths_share_a_batch_and_the_earliest_comes_first():
    assert batches({0: 9, 1: 1, 3: 8, 4: 2, 5: 7}, 2) == [[0], [1, 4], [5, 3]]
    assert batches({}, 3) == []


def test_texts_differ_in_what_is_written(alone: list[Summary]):
    assert len({one.text for one in alone}) > 10, "otherwise a wrong order would not be seen"


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_results_are_those_of_one_by_one_in_order(summarizer: Summarizer, alone: list[Summary], batch_size: int):
    assert summarizer(TEXTS, batch_size=batch_size) == alone


def test_tokens_and_bytes_are_texts_too(summarizer: Summarizer, alone: list[Summary]):
    tokens = summarizer.tokenizer(TEXTS[1], add_special_tokens=False)["input_ids"]
    assert summarizer([TEXTS[0].encode(), tokens, torch.tensor(tokens).numpy()]) == [alone[0], alone[1], alone[1]]


def counting(lengths: list[tuple[int, ...]]) -> Any:
    """Make an engine that notes which lengths share a batch."""

    def engine(model: Any, tokens: Tensor, mask: Tensor, generation: GenerationConfig) -> Tensor:
        lengths.append(tuple(mask.sum(1).tolist()))
        return generate(model, tokens, mask, generation)

    return engine


@pytest.mark.parametrize("skip", [0, 1, 5, 16, 17, 20, 21, 30])
def test_skipped_texts_change_no_batch(summarizer: Summarizer, alone: list[Summary], skip: int):
    whole: list[tuple[int, ...]] = []
    list(Summarizer(summarizer.model, summarizer.tokenizer, engine=counting(whole)).stream(TEXTS, batch_size=2))
    seen: list[tuple[int, ...]] = []
    again = Summarizer(summarizer.model, summarizer.tokenizer, engine=counting(seen))
    assert list(again.stream(TEXTS, batch_size=2, skip=skip)) == alone[skip:]
    assert set(seen) <= set(whole)
    assert len(seen) <= len(whole) - skip // (2 * WINDOW) * WINDOW


def test_results_come_before_all_texts_are_read(summarizer: Summarizer):
    read = []

    def texts() -> Iterator[str]:
        for number, text in enumerate(TEXTS):
            read.append(number)
            yield text

    stream = summarizer.stream(texts(), batch_size=1)
    assert next(stream).error is None
    assert read == [0]
    stream = summarizer.stream(texts(), batch_size=2)
    next(stream)
    assert len(read) == 1 + 2 * WINDOW


def test_a_batch_that_does_not_fit_is_halved(summarizer: Summarizer, alone: list[Summary]):
    sizes = []

    def narrow(model: Any, tokens: Tensor, mask: Tensor, generation: GenerationConfig) -> Tensor:
        sizes.append(len(tokens))
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return generate(model, tokens, mask, generation)

    small = Summarizer(summarizer.model, summarizer.tokenizer, engine=narrow)
    assert small(TEXTS[:7], batch_size=7) == alone[:7]
    assert sizes == [7, 3, 1, 2, 4, 2, 2]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes.\nmore"), "out of memory, even by itself"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out of memory, even by itself"),
        (ValueError("a strange shape\nmore"), "ValueError: a strange shape"),
        (RuntimeError("a kernel failed"), "RuntimeError: a kernel failed"),
    ],
)
def test_a_failure_is_said_of_its_document_alone(
    summarizer: Summarizer, alone: list[Summary], error: Exception, said: str
):
    longest = max(one.document_tokens for one in alone[:5]) + 1

    def choosy(model: Any, tokens: Tensor, mask: Tensor, generation: GenerationConfig) -> Tensor:
        if tokens.shape[1] == longest:
            raise error
        return generate(model, tokens, mask, generation)

    results = Summarizer(summarizer.model, summarizer.tokenizer, engine=choosy)(TEXTS[:5], batch_size=5)
    failed = [place for place, one in enumerate(results) if one.error]
    assert [results[place].error for place in failed] == [said]
    assert [one for place, one in enumerate(results) if place not in failed] == [
        one for place, one in enumerate(alone[:5]) if place not in failed
    ]


# --------------------------------------------------------------------------------------------------------------------
# Lengths
# --------------------------------------------------------------------------------------------------------------------


def test_a_long_document_is_processed_whole_and_said_to_be_long(summarizer: Summarizer):
    entered: list[tuple[int, ...]] = []
    watched = Summarizer(summarizer.model, summarizer.tokenizer, engine=counting(entered))
    exact, long = watched([[5] * 511, [5] * 512], batch_size=1)  # with the end token: 512, what the model is for; 513
    assert entered == [(512,), (513,)]
    assert exact.note is None
    assert long.note == "512 tokens, more than the 512 the model is for: processed whole"
    assert (long.document_tokens, long.cut, long.error) == (512, 0, None)


def test_a_cut_is_counted_and_the_end_token_stays(summarizer: Summarizer):
    seen = []

    def looking(model: Any, tokens: Tensor, mask: Tensor, generation: GenerationConfig) -> Tensor:
        seen.append(tokens.tolist())
        return generate(model, tokens, mask, generation)

    cut, whole = Summarizer(summarizer.model, summarizer.tokenizer, engine=looking)(
        [list(range(10, 30)), [7, 8, 9]], max_length=11, batch_size=1
    )
    assert seen == [[[*range(10, 20), 2]], [[7, 8, 9, 2]]]
    assert (cut.document_tokens, cut.cut, cut.note) == (20, 10, "cut: 10 of 20 tokens left out")
    assert (whole.cut, whole.note) == (0, None)


# --------------------------------------------------------------------------------------------------------------------
# Hostile texts
# --------------------------------------------------------------------------------------------------------------------

ARABIC = "النماذج الطويلة تحتفظ بما تحتاجه المهمة فقط. "
HOSTILE: dict[str, tuple[Any, str | None, str | None]] = {  # text, in its note, in its error
    "empty": ("", None, "empty"),
    "blank": (" \n\t\u00a0\u2003", None, "empty"),
    "invisible": ("\u200b\ufeff\u2060", None, "empty: no visible character"),
    "empty bytes": (b"", None, "empty"),
    "no tokens": ([], None, "no usable text: no token"),
    "unknown tokens": ([3, 3, 3], None, "knows none of it"),
    "foreign tokens": ([5, VOCABULARY], None, f"below {VOCABULARY}"),
    "binary": (bytes(range(256)) * 4, None, "not a text: byte 128"),
    "binary that decodes": ("\x01\x02\x03\x04\x05abc" * 50, None, "control characters"),
    "only NUL": ("\0" * 2, None, "empty: no visible"),
    "many NUL": ("\0" * 4000, None, "4,000 of 4,000 characters"),
    "some NUL": ("a text\0with a hole" * 3, None, None),
    "long": ("pooling keeps tokens. " * 45_455, "processed whole", None),
    "one long word": ("x" * 200_000, "processed whole", None),
    "right to left": (ARABIC * 5, None, None),
    "marks of direction": ("\u202eabc\u202c \u2067abc\u2069", None, None),
    "emoji": ("👩‍👩‍👧‍👦🏳️‍🌈🤷🏽‍♀️" * 5, None, None),
    "lone surrogates": ("half \ud83d and \udc00 half", "2 lone surrogates replaced", None),
    "only surrogates": ("\ud800\udfff", "2 lone surrogates replaced", None),
    "combining": ("e" + "\u0301" * 100, None, None),
    "special tokens": ("<pad></s><s><unk></s>", None, None),
    "UTF-16": ("\ufeffa text".encode("utf-16-le"), None, None),
    "Latin-1": ("déjà vu".encode("latin-1"), None, "not UTF-8"),
    "unusable": (Unusable("not there"), None, "not there"),
}


@pytest.fixture(scope="module")
def answers(summarizer: Summarizer) -> dict[str, Summary]:
    texts = [text for text, _, _ in HOSTILE.values()]
    return dict(zip(HOSTILE, summarizer(texts, batch_size=5), strict=True))


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_comes_is_answered(answers: dict[str, Summary], name: str):
    _, note, error = HOSTILE[name]
    answer = answers[name]
    assert (error in answer.error) if error else answer.error is None, answer
    assert (note in (answer.note or "")) if note else answer.note is None, answer
    assert bool(answer.text) == (error is None)
    if note == "processed whole":
        assert answer.document_tokens > 100_000


def test_others_go_on_beside_hostile_ones(summarizer: Summarizer, alone: list[Summary]):
    mixed: list[Any] = ["", TEXTS[0], b"\xff\xfe\xff", TEXTS[1], "\ud800", TEXTS[2], Unusable("no"), TEXTS[3]]
    assert summarizer(mixed, batch_size=3)[1::2] == alone[:4]
    assert [one.error is None for one in summarizer(["", "\0"])] == [False, False]


def test_written_out_special_tokens_are_text(summarizer: Summarizer):
    entered: list[tuple[int, ...]] = []
    watched = Summarizer(summarizer.model, summarizer.tokenizer, engine=counting(entered))
    watched(["</s>"])
    assert entered[0][0] > 2, "the end of a document was read in its text"


def test_surrogates_are_replaced_and_nul_is_kept():
    assert usable("a\ud800b\0") == ("a\ufffdb\0", "1 lone surrogates replaced")
    assert usable("plain") == ("plain", None)
    assert decode(b"\xef\xbb\xbfmark") == "mark"
    assert usable("\x1b[31mred\x1b[0m") == ("\x1b[31mred\x1b[0m", None)


def test_many_unknown_tokens_are_noted(summarizer: Summarizer):
    answer = summarizer([[3, 9, 9, 9, 9]])[0]
    assert answer.note == "the tokenizer does not know 1 of 5 tokens"
    assert summarizer([[3] + [9] * 10])[0].note is None


# --------------------------------------------------------------------------------------------------------------------
# Loading
# --------------------------------------------------------------------------------------------------------------------


def test_loading_refuses_what_is_no_model(tmp_path: Path, model: Path):
    with pytest.raises(ValueError, match=r"config\.json"):
        Summarizer.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bart"}')
    with pytest.raises(ValueError, match="got one of type 'bart'"):
        Summarizer.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Summarizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text((model / "tokenizer.json").read_text())
    with pytest.raises(ValueError, match="must hold a model and its tokenizer"):
        Summarizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`device` must be"):
        Summarizer.from_pretrained(model, device="gpu")


def test_loading_refuses_missing_weights(tmp_path: Path):
    folder = write_model(tmp_path / "model", decoder_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "decoder_layers": 2}))
    with pytest.raises(ValueError, match="weights, no fewer and no others"):
        Summarizer.from_pretrained(folder)


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(summarizer: Summarizer):
    small = PyramidionForConditionalGeneration(preset("tiny-pyramidion", vocab_size=VOCABULARY - 1))
    with pytest.raises(ValueError, match=f"at most the {VOCABULARY - 1} tokens .* got {VOCABULARY}"):
        Summarizer(small, summarizer.tokenizer)


def test_a_dtype_can_be_chosen(model: Path):
    assert Summarizer.from_pretrained(model, "cpu", torch.bfloat16).model.dtype == torch.bfloat16
    assert Summarizer.from_pretrained(model).model.dtype == torch.float32


# --------------------------------------------------------------------------------------------------------------------
# Journal
# --------------------------------------------------------------------------------------------------------------------


def test_a_journal_drops_only_a_torn_last_line(tmp_path: Path):
    path = tmp_path / "inner" / "rows.jsonl"
    rows = [{"a": 1}, {"b": "zwei\n"}, {"c": "\ud800"}]
    with Journal(path) as journal:
        for row in rows:
            journal.append(row)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert len(read_rows(path)) == whole[:cut].count(b"\n")
        with Journal(path) as journal:
            assert len(journal.rows) == whole[:cut].count(b"\n")
            for row in rows[len(journal.rows) :]:
                journal.append(row)
        assert path.read_bytes() == whole


def test_a_journal_refuses_what_it_did_not_write(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n[1]\n{"a": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        Journal(path)
    path.write_bytes(b'{"a": 1}\n\0\0\0\0\n')
    with Journal(path) as journal:
        assert journal.rows == [{"a": 1}]
    assert path.read_bytes() == b'{"a": 1}\n'


def test_a_journal_has_one_writer(tmp_path: Path):
    with Journal(tmp_path / "rows.jsonl"), pytest.raises(ValueError, match="one process at a time"):
        Journal(tmp_path / "rows.jsonl")
    Journal(tmp_path / "rows.jsonl").file.close()


def test_a_line_is_one_line_in_utf8():
    assert to_line({"a": "é\n\ud800"}) == '{"a": "é\\n?"}\n'


# --------------------------------------------------------------------------------------------------------------------
# Documents
# --------------------------------------------------------------------------------------------------------------------


def found(*paths: Path | str, field: str = "document", stdin: bytes = b"", leave: Path | None = None) -> list[Any]:
    return list(documents([str(path) for path in paths], field, io.BytesIO(stdin), leave))


def test_json_lines_are_read_line_by_line(tmp_path: Path):
    path = tmp_path / "many.jsonl"
    lines = [
        '{"document": "one"}',
        "",
        "{torn",
        "[1]",
        '{"text": 1}',
        '{"document": ["a", "b"]}',
        '"\ud800"',
        "[" * 9999,
    ]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass") + b'\n{"document": "\\ud800"}')
    read = found(path)
    assert [one.index for one in read] == [0, 2, 3, 4, 5, 6, 7, 8]
    assert read[0].text == "one"
    assert read[4].text == "a\nb"
    assert read[7].text == "\ud800"
    reasons = [one.text.reason for one in read if isinstance(one.text, Unusable)]
    said = ["not JSON", "not a JSON object", "'document'; there is text", "not UTF-8", "not JSON"]
    assert len(reasons) == 5
    assert all(part in reason for part, reason in zip(said, reasons, strict=True)), reasons


def test_folders_are_read_in_order_and_without_results(tmp_path: Path):
    for name in ("b.txt", "a/z.txt", "a/y.md", ".hidden", "a.txt", "out/a.txt.summary.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    os.mkfifo(tmp_path / "pipe")
    names = [one.name for one in found(tmp_path, leave=tmp_path / "out")]
    assert names == ["a.txt", "b.txt", "a/y.md", "a/z.txt"]
    assert len(found(tmp_path)) == 5
    assert [one.name for one in found(tmp_path / "a", leave=tmp_path / "a" / "y.md")] == ["z.txt"]


def test_standard_input_is_a_text_or_json_lines():
    assert [one.text for one in found("-", stdin=b"{a text\nof lines}")] == [b"{a text\nof lines}"]
    lines = b'{"t": "one"}\n{"t": "two"}'
    assert [(one.index, one.text) for one in found("-", stdin=lines, field="t")] == [(0, "one"), (1, "two")]
    assert [one.text for one in found("-", stdin=b"")] == [b""]


# --------------------------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------------------------


def call(model: Path, *arguments: Any, stdin: bytes = b"") -> Any:
    return CliRunner().invoke(main, ["summarize", "--model", str(model), *map(str, arguments)], input=stdin)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for place, text in enumerate(TEXTS[:5]):
        (folder / f"{place}.txt").write_text(text)
    return folder


def test_one_text_is_written_bare(model: Path, files: Path, alone: list[Summary]):
    done = call(model, files / "0.txt")
    assert (done.exit_code, done.stdout, done.stderr) == (0, alone[0].text + "\n", "")
    done = call(model, stdin=TEXTS[0].encode())
    assert (done.exit_code, done.stdout) == (0, alone[0].text + "\n")


def test_several_texts_have_headers(model: Path, files: Path, alone: list[Summary]):
    done = call(model, files / "0.txt", files / "1.txt")
    expected = f"==> {files / '0.txt'} <==\n{alone[0].text}\n\n==> {files / '1.txt'} <==\n{alone[1].text}\n"
    assert (done.exit_code, done.stdout) == (0, expected)
    done = call(model, "-", stdin=json.dumps({"document": TEXTS[0]}).encode())
    assert done.stdout == f"==> -:1 <==\n{alone[0].text}\n"


def test_failures_are_reported_and_the_others_go_on(model: Path, files: Path, alone: list[Summary]):
    (files / "1.txt").write_bytes(b"\x00\xff\xfe binary")
    (files / "2.txt").write_text("")
    done = call(model, files, "--format", "jsonl")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.exit_code == 1
    assert [row["summary"] for row in rows] == [alone[0].text, "", "", alone[3].text, alone[4].text]
    assert [row["error"] is None for row in rows] == [True, False, False, True, True]
    assert list(rows[0]) == ["source", "index", "summary", "document_tokens", "note", "error"]
    assert rows[3]["document_tokens"] == alone[3].document_tokens
    assert f"pyramidion: {files / '2.txt'}: empty\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_hostile_text_goes_through_the_command(model: Path, tmp_path: Path):
    lines = tmp_path / "hostile.jsonl"
    texts = {name: text for name, (text, _, _) in HOSTILE.items() if isinstance(text, str) and name != "one long word"}
    lines.write_text("".join(json.dumps({"document": text}) + "\n" for text in texts.values()))
    done = call(model, lines, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 3)
    rows = read_rows(tmp_path / "out.jsonl")
    assert done.exit_code == 1
    assert [row["error"] is None for row in rows] == [HOSTILE[name][2] is None for name in texts]


def test_a_cut_is_told(model: Path, files: Path):
    done = call(model, files / "0.txt", "--max-length", 4)
    assert "0.txt: cut: " in done.stderr
    assert "tokens left out" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.txt"], "`PATHS` must be files and folders that exist, got 'missing.txt'"),
        (["{files}", "--format", "xml"], "`--format` must be text or jsonl, got 'xml'"),
        (["{files}", "--resume"], "`--resume` must have an `--output`"),
        (["{files}", "--resume", "--output", "out.txt"], "texts do not say where they end"),
        (["{files}", "--batch-size", "0"], "`batch_size` must be at least 1, got 0"),
        (["{files}", "--device", "tpu9"], "`device` must be"),
        (["{files}", "--num-beams", "0"], "`num_beams` must be"),
        (["{empty}"], "must hold at least one file"),
    ],
)
def test_wrong_calls_end_with_2(model: Path, files: Path, tmp_path: Path, arguments: list[str], said: str):
    (tmp_path / "empty").mkdir()
    places = {"files": str(files), "empty": str(tmp_path / "empty")}
    done = call(model, *(argument.format(**places) for argument in arguments))
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""


def test_a_model_that_is_none_ends_with_2(files: Path):
    done = call(files, files)
    assert (done.exit_code, "config.json" in done.stderr) == (2, True)


def test_output_is_not_overwritten(model: Path, files: Path, tmp_path: Path):
    for output in (tmp_path / "out.txt", tmp_path / "out.jsonl", tmp_path / "out"):
        assert call(model, files, "--output", output).exit_code == 0
        done = call(model, files, "--output", output)
        assert (done.exit_code, "--resume" in done.stderr) == (2, True)


def test_lines_go_on_where_they_ended(model: Path, files: Path, tmp_path: Path):
    output = tmp_path / "out.jsonl"
    assert call(model, files, "--output", output, "--batch-size", 2).exit_code == 0
    whole = output.read_bytes()
    assert [row["index"] for row in read_rows(output)] == [0] * 5
    for cut in (0, 5, whole.index(b"\n") + 1, len(whole) - 1, len(whole)):
        output.write_bytes(whole[:cut])
        assert call(model, files, "--output", output, "--batch-size", 2, "--resume").exit_code == 0
        assert output.read_bytes() == whole
    output.write_bytes(whole)
    (files / "00.txt").write_text("another first")
    done = call(model, files, "--output", output, "--resume")
    assert (done.exit_code, "must be given the documents of the first run: line 2" in done.stderr) == (2, True)


def test_a_folder_has_a_file_for_each(model: Path, files: Path, tmp_path: Path, alone: list[Summary]):
    (files / "1.txt").write_text("")
    (files / "sub").mkdir()
    (files / "sub" / "0.txt").write_text(TEXTS[6])
    output = tmp_path / "out"
    assert call(model, files, files / "0.txt", "--output", output).exit_code == 1
    written = {path.relative_to(output).as_posix(): path.read_text() for path in output.rglob("*.txt")}
    numbers = {"0.txt": 0, "2.txt": 2, "3.txt": 3, "4.txt": 4, "sub/0.txt": 6, "0.txt-2": 0}
    expected = {f"{name}.summary.txt": alone[place].text + "\n" for name, place in numbers.items()}
    assert written == {**expected, "1.txt.error.txt": "empty\n"}
    (output / "3.txt.summary.txt").unlink()
    (output / "sub" / "0.txt.summary.txt").unlink()
    assert call(model, files, files / "0.txt", "--output", output, "--resume").exit_code == 1
    assert {path.relative_to(output).as_posix(): path.read_text() for path in output.rglob("*.txt")} == written


def command(model: Path, *arguments: Any) -> list[str]:
    script = "from pyramidion.cli import main; main()"
    return [sys.executable, "-c", script, "summarize", "--model", str(model), *map(str, arguments)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_quietly(model: Path, tmp_path: Path):
    lines = tmp_path / "many.jsonl"
    lines.write_text("".join(json.dumps({"document": text}) + "\n" for text in TEXTS * 20))
    arguments = command(model, lines, "--format", "jsonl", "--batch-size", 1)
    running = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert running.stdout is not None
    assert running.stderr is not None
    first = json.loads(running.stdout.readline())
    running.stdout.close()
    said = running.stderr.read().decode()
    running.stderr.close()
    assert (running.wait(60), first["index"], said) == (141, 0, "")


def kill_when(running: subprocess.Popen[bytes], path: Path, lines: int) -> int:
    """Kill a process as soon as a file has so many lines; say how many it has then."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and running.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.005)
    running.send_signal(signal.SIGKILL)
    running.wait(10)
    return path.read_bytes().count(b"\n")


@pytest.mark.slow
def test_killed_and_resumed_is_as_never_killed(model: Path, tmp_path: Path):
    lines = tmp_path / "many.jsonl"
    lines.write_text("".join(json.dumps({"document": text}) + "\n" for text in TEXTS * 4))
    options = ("--batch-size", 2)
    assert call(model, lines, "--output", tmp_path / "whole.jsonl", *options).exit_code == 0
    output = tmp_path / "killed.jsonl"
    running = subprocess.Popen(command(model, lines, "--output", output, *options), env=ENVIRONMENT)
    assert 5 <= kill_when(running, output, 5) < 84
    with output.open("ab") as file:
        file.write(b'{"source": "torn')
    assert call(model, lines, "--output", output, "--resume", *options).exit_code == 0
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
