"""The demonstration: what it shows is what the Selection says, and no file makes it stumble."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pyramidion import demo


@pytest.fixture(scope="module")
def article() -> demo.Document:
    return demo.parse(*demo.built_in())


@pytest.fixture(scope="module")
def pyramid(article: demo.Document) -> demo.Pyramid:
    return demo.select(demo.score(article), 64)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs the demonstration as in a pipe and gives back what it printed."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(path: Path | None = None, keep: int = 64, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        demo.run(path, keep)
        return capsys.readouterr().out

    return run


def document(text: str) -> demo.Document:
    return demo.parse("text", text.encode())


# --------------------------------------------------------------------------------------------------------------------
# The text
# --------------------------------------------------------------------------------------------------------------------


def test_the_article_is_long_and_has_sections(article: demo.Document):
    sections = demo.find_sections(article)
    assert 4500 <= len(article.words) <= 5000
    assert len(sections) == 12
    assert sections[0].title == "How Living Cells Count to Twenty-Four Hours"
    assert all(before.end == after.start for before, after in pairwise(sections))
    assert (sections[0].start, sections[-1].end) == (0, len(article.words))


def test_words_know_their_place():
    text = document("Heading\n\nOne's well-known word. Two…\n\nThree  ")
    assert [text.word(i) for i in range(6)] == ["Heading", "One's", "well-known", "word", "Two", "Three"]
    assert [word.sentence for word in text.words] == [0, 1, 1, 1, 2, 3]
    assert [word.paragraph for word in text.words] == [0, 1, 1, 1, 1, 2]
    assert [paragraph.number for paragraph in text.paragraphs] == [0, 1, 2]


def test_sections_without_headings_are_equal_parts():
    sections = demo.find_sections(document("word " * 80 + "."))
    assert [section.end - section.start for section in sections] == [10] * 8
    assert sections[1].title == "words 11 to 20"
    assert len(demo.find_sections(document("one two three."))) == 3


def test_words_before_the_first_heading_are_counted():
    sections = demo.find_sections(document("Before it.\n\n# Heading\n\nAfter it, much."))
    assert [tuple(section) for section in sections] == [("(before the first heading)", 0, 2), ("Heading", 2, 6)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_that_name_themselves_are_read(encoding: str):
    text, replaced = demo.decode("naïve café\r\nœuvre".encode(encoding))
    assert (text, replaced) == ("naïve café\nœuvre", 0)


# --------------------------------------------------------------------------------------------------------------------
# Scores and shares
# --------------------------------------------------------------------------------------------------------------------


def test_scores_are_finite_and_standardised(article: demo.Document):
    scores = demo.score(article)
    assert scores.shape == (1, len(article.words))
    assert scores.isfinite().all()
    assert abs(float(scores.mean())) < 1e-5
    assert float(scores.std(correction=0)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("text", ["one", "one two six.", "x " * 50, "a" * 100_000 + " b c"])
def test_scores_of_odd_texts_are_finite(text: str):
    assert demo.score(document(text)).isfinite().all()


def test_a_topic_scores_above_a_particle(article: demo.Document):
    scores = demo.score(article)[0]
    first = {article.word(i).casefold(): float(scores[i]) for i in reversed(range(len(article.words)))}
    assert max(first["the"], first["of"], first["and"]) < 0.5
    assert min(first["cyanobacterium"], first["suprachiasmatic"], first["cryptochrome"]) > 2


@pytest.mark.parametrize("keep", [1, 7, 64, 450, 1000, 5000])
def test_shares_are_those_of_the_dense_selection(article: demo.Document, keep: int):
    pyramid = demo.select(demo.score(article), keep)
    dense = pyramid.second.dense() @ pyramid.first.dense()  # [1 k n]
    assert pyramid.whole.k == min(keep, len(article.words))
    torch.testing.assert_close(pyramid.shares, dense.sum(1)[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(pyramid.whole.dense(), dense, rtol=0, atol=1e-6)


def test_members_are_those_of_the_dense_selection(pyramid: demo.Pyramid):
    for slot, row in enumerate(pyramid.whole.dense()[0]):
        listed = demo.members(pyramid.whole, slot)
        assert listed[0][0] == int(pyramid.whole.winners[0, slot])
        assert [weight for _, weight in listed[1:]] == sorted((weight for _, weight in listed[1:]), reverse=True)
        assert all(weight == float(row[i]) for i, weight in listed)
        assert sum(weight for _, weight in listed) == pytest.approx(1, abs=1e-5)


def test_sections_sum_to_everything_that_was_kept(article: demo.Document, pyramid: demo.Pyramid):
    sections = demo.find_sections(article)
    kept = demo.kept_by_section(pyramid.shares, sections)
    assert sum(kept) == pytest.approx(1, abs=1e-9)
    start, end = sections[2].start, sections[2].end
    assert kept[2] == pytest.approx(float(pyramid.whole.dense()[0, :, start:end].sum()) / 64, abs=1e-5)


def test_check_measures(pyramid: demo.Pyramid):
    assert max(demo.check(pyramid)) < 1e-5
    whole = pyramid.whole
    heavier = demo.Selection(whole.slots, whole.weights * 1.5, whole.mask, whole.scores, whole.winners, whole.members)
    sums, pooled = demo.check(demo.Pyramid(pyramid.first, pyramid.second, heavier, 0.0))
    assert sums == pytest.approx(0.5, abs=1e-4)
    assert pooled > 0.1


def test_the_densest_passage_is_found():
    text = document("Plain words here. " * 40 + "Heavy words here. " * 5 + "Plain words here. " * 40)
    shares = torch.tensor([float(text.word(i) == "Heavy") for i in range(len(text.words))])
    start, end = demo.densest(text, shares, room=100, line=20)
    assert shares[start:end].sum() == 5
    assert text.word(start) in ("Plain", "Heavy")  # whole sentences
    assert text.word(end - 1) == "here"
    assert text.words[end - 1].end - text.words[start].start <= 120


def test_a_passage_does_not_end_with_a_heading():
    text = document("Heavy words here.\n\nHeading\n\n" + "plain " * 60 + ".")
    shares = torch.tensor([float(text.word(i) == "Heavy") for i in range(len(text.words))])
    assert demo.densest(text, shares, room=40, line=5) == (0, 3)


def test_a_passage_is_the_text_itself():
    source = "Title\n\n(One) two, “three”\nfour. Five?!\n\n- six; [seven] eight…"
    text = document(source)
    blocks = list(demo.passage(text, torch.zeros(len(text.words)), 80, colour=True))
    assert "".join(f"{block.plain}\n" for block in blocks[2:]).strip() == source.replace("”\n", "” ")


# --------------------------------------------------------------------------------------------------------------------
# What is printed
# --------------------------------------------------------------------------------------------------------------------


def shown(text: str) -> str:
    """Join lines that were wrapped."""
    return " ".join(text.split())


@pytest.mark.parametrize("columns", [80, 120])
def test_a_pipe_gets_plain_text(printed, columns: int):
    text = printed(columns=columns)
    assert not re.search(r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert demo.HONESTY in shown(text)
    assert "4,770 words to 64 slots, 2+5 rounds, torch backend" in text.splitlines()[0]
    assert "**phosphorylation**" in text
    assert "A clock in a test tube" in text
    assert len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines())) <= columns


def test_the_same_every_time(printed):
    first, second = (re.sub(r"took [\d.]+\s+ms", "", printed()) for _ in range(2))
    assert first == second


def test_a_terminal_gets_shades(article: demo.Document, pyramid: demo.Pyramid):
    blocks = list(demo.passage(article, pyramid.shares, 80, colour=True))
    styles = {block.plain[span.start : span.end]: str(span.style) for block in blocks for span in block.spans}
    share = {article.word(i): float(pyramid.shares[i]) for i in range(len(article.words))}
    assert share["dephosphorylation"] >= 0.5
    assert styles["dephosphorylation"] == styles["half or more"]
    assert not any("**" in block.plain for block in blocks)


def test_markup_and_escapes_are_inert(printed, tmp_path: Path):
    path = tmp_path / "[red]name\x1b[31m.txt"
    hostile = "A [bold]word[/bold] [/] :smile: \x1b[31mred\x07 \u202eback\x9b"
    path.write_text(f"# [blink]Title[/blink]\n\n{hostile} and so much more of it.", encoding="utf-8")
    text = printed(path, keep=2, columns=120)
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}
    passage = text.replace("*", "")
    assert "[bold]word[/bold] [/] :smile: ␛[31mred␇ \ufffdback\ufffd" in passage
    assert "[blink]Title[/blink]" in passage
    assert "[red]name␛[31m.txt" in text


def test_a_terminal_without_the_characters_gets_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "out.txt"
    with path.open("w", encoding="ascii") as file:
        monkeypatch.setattr("sys.stdout", file)
        demo.run(None, 16)
    assert "####" in path.read_text()


# --------------------------------------------------------------------------------------------------------------------
# Files of every kind
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "at least one word, got an empty file"),
        (b" \n\n\t ", "at least one word, got an empty file"),
        (b"... !!! ---", "at least one word, got 11 characters without one"),
        (b"\x7fELF\x02\x00\x00", "must be text, got a zero byte at position 5"),
        (bytes(range(1, 256)) * 9, "must be UTF-8 text, got 6.% unreadable"),
        (b"word " * (demo.LIMIT // 5 + 1), "must be at most 4 MiB"),
    ],
    ids=["empty", "blank", "punctuation", "binary", "noise", "too-long"],
)
def test_what_is_no_text_is_refused_in_one_line(raw: bytes, message: str, tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message) as refusal:
        demo.run(path, 64)
    assert "\n" not in str(refusal.value)


def test_what_cannot_be_read_is_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="must be a file that can be read, got"):
            demo.run(path, 64)


@pytest.mark.parametrize("keep", [0, -3])
def test_keeping_nothing_is_refused(keep: int):
    with pytest.raises(ValueError, match=f"`--keep` must be at least 1, got {keep}"):
        demo.run(None, keep)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"hello", "1 word to 1 slot, 0+0 rounds"),
        (b"caf\xe9 au lait et un grand verre de bon vin", "not UTF-8 are shown as \ufffd: 1."),
        (b"x\n\n" * 3000, "3,000 words to 64 slots"),
        (b"a" * 300_000, "a…"),
        (b"." * 100_000 + b" end", "…**end**"),
        (b"one two three", "No more words than the 64 slots asked for"),
        (b"# A\n\nb c d.\n\n" * 30, "(21 other sections)"),
    ],
    ids=["one-word", "latin-1", "lines", "long-word", "dots", "fewer-words", "sections"],
)
def test_odd_files_work(printed, raw: bytes, expected: str, tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(raw)
    text = printed(path)
    assert expected in shown(text)
    assert len(text.splitlines()) <= 64


def test_keep_may_exceed_any_memory(printed):
    assert "4,770 words to 4,770 slots" in printed(keep=10**15)


def test_a_file_of_a_megabyte_works(printed, tmp_path: Path):
    path = tmp_path / "large.txt"
    path.write_text("".join(f"Sentence {i} holds word{i % 977}. " for i in range(36_000)))
    assert path.stat().st_size > 10**6
    assert "144,000 words to 64 slots" in printed(path)


def test_the_command_refuses_a_file_without_text_in_one_line(tmp_path: Path):
    from typer.testing import CliRunner

    from pyramidion.cli import main

    (tmp_path / "empty.txt").touch()
    result = CliRunner().invoke(main, ["demo", str(tmp_path / "empty.txt")])
    assert result.exit_code == 2
    assert re.fullmatch(r"pyramidion: .*\n", result.stderr)
