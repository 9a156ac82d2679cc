"""Data: what is read comes back to the byte, what is bad is named with its line, and what is on disk is whole."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pyramidion.cli import main
from pyramidion.data import Collator, Example, LengthGroupedBatches, TokenStore
from pyramidion.data import preparation as preparation_module
from pyramidion.data import report as data_report
from pyramidion.data.preparation import BadLines, Settings, prepare
from pyramidion.data.sources import Columns, find_sources
from pyramidion.data.streams import BOM, chunks
from pyramidion.data.tokenizer import Encoder, is_byte_level, load_tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
ESSAY = (ROOT / "src" / "pyramidion" / "assets" / "document.txt").read_text()
ODD = [
    "plain words, and 'tis don't we'll 12,345.67 (a-b) e.g. i.e.",
    "  two  spaces   three    four \n\n\n newlines \r\n\t tabs\v\f  ",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and ≥ – “quotes” … ½ ² ٣ Ⅷ",
    "right to left: שלום עולم مرحبا \u202eabc\u202c",
    "controls \x00\x01\x1b\x1c\x1f\x7f\x85\xa0\u2028\u2029\u200b\ufeff\uffff end",
    "中文沒有空格，所以是一個長的片段。日本語も同じです。",
    "specials </s> <s>text<pad> <unk> <S> </S>",
    "Ġ Ċ combining e\u0301 n\u0303 \u0300",
    "a",
    " lead and trail ",
]


def article(i: int, words: int = 40) -> dict[str, Any]:
    """Make a record that differs from every other."""
    rng = random.Random(i)
    words_of = ESSAY.split()
    text = " ".join(rng.choices(words_of, k=words)) + f"\nNumber {i}. {ODD[i % len(ODD)]}"
    return {"id": f"doc-{i}", "article": text, "abstract": f"Summary {i}: {' '.join(rng.choices(words_of, k=7))}"}


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def run(paths: Sequence[Any], output: Path, *, named: Sequence[tuple[str, str]] = (), **asked: Any) -> TokenStore:
    """Prepare in this process, with a small vocabulary, and open the result."""
    columns = Columns(**{key: asked.pop(key) for key in ("document", "summary", "id") if key in asked})
    sources, _ = find_sources([str(path) for path in paths], named, asked.pop("format", "auto"), columns)
    given_ = {"vocab_size": 300, "workers": 1, **asked}
    return prepare(Settings(sources, output, **given_)).store


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(main, ["prepare", *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a corpus with three splits."""
    place = tmp_path_factory.mktemp("corpus")
    write_jsonl(place / "train.jsonl", [article(i) for i in range(31)])
    write_jsonl(place / "valid.jsonl", [article(i) for i in range(31, 38)])
    write_jsonl(place / "test.jsonl", [article(i) for i in range(38, 43)])
    return place


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold the store made of it; nobody may change it."""
    return run([folder], tmp_path_factory.mktemp("stores") / "store").path


@pytest.fixture(scope="module")
def tokenizer_folder(finished: Path) -> str:
    return str(finished / "tokenizer")


@pytest.fixture
def drawn() -> None:
    """Let figures be drawn: that takes longer than all the rest."""


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("pyramidion.data.report.write_figure", lambda path, _: path.write_bytes(b"a figure"))


@pytest.fixture
def store(finished: Path) -> TokenStore:
    return TokenStore.open(finished)


# --------------------------------------------------------------------------------------------------------------------
# There and back
# --------------------------------------------------------------------------------------------------------------------


def assert_holds(store: TokenStore, split: str, records: Sequence[dict[str, Any]]) -> None:
    """Compare texts, ids, tokens and lengths of a split with what went in."""
    held, tokenizer = store[split], store.tokenizer()
    assert len(held) == len(records)
    for i, record in enumerate(records):
        found = held[i]
        assert held.document_text(i) == record["article"]
        assert held.summary_text(i) == record["abstract"]
        assert found.id == record["id"]
        assert tokenizer.decode(found.document.tolist()) == record["article"]
        assert tokenizer.decode(found.summary.tolist()) == record["abstract"]
        assert found.document.tolist() == tokenizer(record["article"])["input_ids"]
        assert (held.document_lengths[i], held.summary_lengths[i]) == (len(found.document), len(found.summary))


def test_what_goes_in_comes_out(store: TokenStore):
    assert store.splits == ["train", "val", "test"]
    assert_holds(store, "train", [article(i) for i in range(31)])
    assert_holds(store, "val", [article(i) for i in range(31, 38)])
    assert_holds(store, "test", [article(i) for i in range(38, 43)])
    store.verify()


def test_a_split_is_a_sequence(store: TokenStore):
    train = store["train"]
    assert train[-1].id == train[30].id == "doc-30"
    assert [found.id for found in train] == [f"doc-{i}" for i in range(31)]
    assert train[0].document.dtype == np.int64
    for index in (31, -32):
        with pytest.raises(IndexError, match="below 31"):
            train[index]
        with pytest.raises(IndexError):
            train.document_text(index)
    assert len(store["validation"]) == len(store["dev"]) == 7
    assert "valid" in store
    assert "nothing" not in store
    with pytest.raises(KeyError, match="train, val, test"):
        store["nothing"]


def test_lengths_are_mapped(store: TokenStore):
    for lengths in (store["train"].document_lengths, store["train"].summary_lengths):
        base: Any = lengths
        while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap)
        assert not lengths.flags.writeable


def test_a_store_travels_to_other_processes_without_its_tokens(store: TokenStore):
    _ = store["train"][3]
    data = pickle.dumps((store, store["val"]))
    assert len(data) < 1000
    again, val = pickle.loads(data)
    assert again.fingerprint == store.fingerprint
    assert val[2].id == store["val"][2].id


def test_shards_are_cut_between_examples(folder: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyramidion.data.formats.chunks", lambda path, size=0: chunks(path, 700))
    small = run([folder], tmp_path / "small", shard_bytes=2048)
    assert len(small.manifest["splits"]["train"]["tokens"]) > 5
    assert len(small.manifest["splits"]["train"]["text"]) > 5
    assert_holds(small, "train", [article(i) for i in range(31)])
    assert list(small["train"].summary_texts()) == [article(i)["abstract"] for i in range(31)]
    assert small.fingerprint != TokenStore.open(finished).fingerprint
    small.verify()


def test_two_workers_write_the_same_bytes_as_one(
    folder: Path, tmp_path: Path, drawn: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pyramidion.data.formats.chunks", lambda path, size=0: chunks(path, 700))
    one, two = (run([folder], tmp_path / f"{n}", workers=n).path for n in (1, 2))
    assert every_file(one) == every_file(two)
    for name in every_file(one):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_special_ids(store: TokenStore):
    tokenizer = store.tokenizer()
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == ["<pad>", "<s>", "</s>", "<unk>"]
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert ids == (0, 1, 2, 3)
    assert store.vocab_size == len(tokenizer) == 300
    assert store.manifest["special"] == {"pad": 0, "bos": 1, "eos": 2, "unk": 3}
    for found in store["train"]:
        assert found.document.min() > 3, "a special token is written in the text and must stay text"


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path, folder: Path, tokenizer_folder: str):
    large = json.loads(Path(tokenizer_folder, "tokenizer.json").read_text())
    size = len(large["model"]["vocab"])
    large["model"]["vocab"] |= {f"{i}!": i for i in range(size, 70000)}
    shutil.copytree(tokenizer_folder, tmp_path / "large")
    (tmp_path / "large" / "tokenizer.json").write_text(json.dumps(large))
    store = run([folder], tmp_path / "store", tokenizer=str(tmp_path / "large"))
    assert store.manifest["dtype"] == "uint32"
    assert store.vocab_size == 70000
    assert_holds(store, "test", [article(i) for i in range(38, 43)])


# --------------------------------------------------------------------------------------------------------------------
# The tokenizer
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoders() -> tuple[Encoder, Encoder]:
    """Pair the encoder that looks pieces up with one that asks the tokenizer for everything.

    The tokenizer merges whatever its pattern leaves together, so that a wrong cut shows in the tokens.
    """
    rng = random.Random(0)
    texts = ["".join(rng.choices(SIGNS, k=30)) for _ in range(700)]
    source = train_tokenizer([*texts, *ODD * 9], 2500).backend_tokenizer.to_str()
    quick, plain = (Encoder(source, np.dtype("<u2")) for _ in range(2))
    assert quick.by_pieces
    plain.by_pieces = False
    return quick, plain


SIGNS = ["a", "Zs", "'s", "'ll", "'", "''", "1", "٣", "²", " ", "  ", "\n", "\r\n", "\t", "\v", ".", ",", "(", "é", "α"]
SIGNS += ["\x00", "\x1c", "\x1f", "\x7f", "\x85", "\xa0", "\u1680", "\u2003", "\u2028", "\u202f", "\u205f", "\u3000"]
SIGNS += ["\u200b", "\ufeff", "\uffff", "“", "中", "😀", "Ġ", "Ċ", "</s>", "_", "-", "word", " word"]
TEXTS = st.lists(st.one_of(st.lists(st.sampled_from(SIGNS), max_size=12).map("".join), st.text()), max_size=5)


@given(TEXTS)
@settings(max_examples=400, deadline=None)
@example(ODD)
@example(["", "", " ", "a  ", "b", "\n", " \n ", ""])
def test_looking_up_is_encoding(encoders: tuple[Encoder, Encoder], texts: list[str]):
    quick, plain = encoders
    data = [text.encode("utf-8", "ignore") for text in texts]
    if not data:
        return
    expected, counts = plain.encode(data)
    found, found_counts = quick.encode(data)
    assert found == expected
    assert found_counts.tolist() == counts.tolist()


def test_looking_up_forgets_and_goes_on(encoders: tuple[Encoder, Encoder], monkeypatch: pytest.MonkeyPatch):
    quick, plain = encoders
    monkeypatch.setattr("pyramidion.data.tokenizer.REMEMBERED", 50)
    for i in range(5):
        data = [article(i)["article"].encode()]
        assert quick.encode(data)[0] == plain.encode(data)[0]
        assert len(quick.pieces) < 500
    assert (
        quick.encode([b"x" * 1000 + "中".encode() * 1000])[0] == plain.encode([b"x" * 1000 + "中".encode() * 1000])[0]
    )
    assert max(map(len, quick.pieces)) <= 64


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_decoding_gives_the_text_back(tokenizer_folder: str, text: str):
    tokenizer = _loaded(tokenizer_folder)
    clean = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer.encode(clean)) == clean
    assert tokenizer.decode(tokenizer.encode(clean), skip_special_tokens=True) == clean


def _loaded(path: str, known: dict[str, Any] = {}) -> Any:  # noqa: B006
    from transformers import AutoTokenizer

    if path not in known:
        known[path] = AutoTokenizer.from_pretrained(path)
    return known[path]


def test_either_class_loads_it(tokenizer_folder: str):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        tokenizer = kind.from_pretrained(tokenizer_folder)
        for text in ODD:
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_only_plain_byte_level_bpe_is_cut(tokenizer_folder: str):
    plain = json.loads(Path(tokenizer_folder, "tokenizer.json").read_text())
    assert is_byte_level(plain)
    added = {"content": "x y", "special": False}
    for change in (
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {**plain["pre_tokenizer"], "add_prefix_space": True}},
        {"pre_tokenizer": {**plain["pre_tokenizer"], "use_regex": False}},
        {"model": {**plain["model"], "dropout": 0.1}},
        {"model": {**plain["model"], "type": "WordPiece"}},
        {"added_tokens": [*plain["added_tokens"], added]},
    ):
        assert not is_byte_level({**plain, **change}), change


def test_a_tokenizer_of_another_kind_is_taken(tmp_path: Path, folder: Path):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for i in range(43) for word in re.findall(r"\w+|[^\w\s]+", article(i)["article"].lower())})
    vocab = {word: i for i, word in enumerate(["[PAD]", "[EOS]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")
    fast.save_pretrained(tmp_path / "words")
    store = run([folder], tmp_path / "store", tokenizer=str(tmp_path / "words"))
    expected = fast(article(33)["article"])["input_ids"]
    assert store["val"][2].document.tolist() == expected
    assert store["val"].document_text(2) == article(33)["article"]


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path, tokenizer_folder: str):
    shutil.copytree(tokenizer_folder, tmp_path / "endless")
    config = json.loads((tmp_path / "endless" / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "endless" / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="must have a padding and an end token"):
        load_tokenizer(str(tmp_path / "endless"))
    with pytest.raises(ValueError, match="`--tokenizer` must be a folder or name"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_a_bare_file_is_a_tokenizer(tmp_path: Path, tokenizer_folder: str):
    shutil.copy(Path(tokenizer_folder, "tokenizer.json"), tmp_path / "tokenizer.json")
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)


def test_the_tokenizer_sees_the_training_split_alone(tmp_path: Path):
    write_jsonl(tmp_path / "train.jsonl", [article(i) for i in range(9)])
    write_jsonl(tmp_path / "test.jsonl", [{"article": "qqqzzz " * 3000, "abstract": "qqqzzz"}])
    store = run([tmp_path], tmp_path / "store", validation=0)
    assert not any("qqq" in token for token in store.tokenizer().get_vocab())


def test_the_tokenizer_does_not_see_what_is_split_off(tmp_path: Path):
    words = [f"{chr(97 + i)}{chr(98 + i)}QX{chr(97 + i)}" for i in range(20)]
    path = write_jsonl(tmp_path / "all.jsonl", [{"article": f"{word} " * 99, "abstract": word} for word in words])
    store = run([path], tmp_path / "store", validation=0.5, vocab_size=500)
    known = {token.strip("Ġ") for token in store.tokenizer().get_vocab()}
    assert {store["train"].summary_text(i) for i in range(len(store["train"]))} == known & set(words)
    assert len(store["val"]) > 3


def test_a_sample_is_taken_evenly(tmp_path: Path):
    marks = "ABC"  # each text begins with that of its file, however short it is cut
    for i, mark in enumerate(marks):
        own = [article(100 * i + j) for j in range(9 * i + 1)]
        marked = [{name: mark + text for name, text in record.items()} for record in own]
        write_jsonl(tmp_path / f"train-{i}.jsonl", marked)
    sources, _ = find_sources([str(tmp_path)], [])
    asked = Settings(sources, tmp_path / "out", validation=0, sample=3000)
    texts = list(preparation_module._sample(asked, lambda *_: None))
    taken = [sum(len(text) for text in texts if text.startswith(mark)) for mark in marks]
    assert sum(taken) == 3000
    assert taken[0] == sum(len(text) + 1 for name, text in article(0).items() if name != "id")
    assert abs(taken[1] - taken[2]) <= 1, "two files that have enough give equally much"


# --------------------------------------------------------------------------------------------------------------------
# Formats
# --------------------------------------------------------------------------------------------------------------------

RECORDS = [article(i) for i in range(13)]


def as_jsonl(path: Path) -> Path:
    return write_jsonl(path / "data.jsonl", RECORDS)


def as_csv(path: Path) -> Path:
    with (path / "data.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["abstract", "id", "article"])
        writer.writeheader()
        writer.writerows(RECORDS)
    return path / "data.csv"


def as_semicolons(path: Path) -> Path:
    with (path / "data.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["article", "abstract", "id"], delimiter=";", quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(RECORDS)
    return path / "data.csv"


def as_parquet(path: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path / "data.parquet")
    return path / "data.parquet"


def as_pairs(path: Path) -> Path:
    for record in RECORDS:
        (path / f"{record['id']}.txt").write_bytes(record["article"].encode())
        (path / f"{record['id']}.summary.txt").write_bytes(record["abstract"].encode())
    return path


def as_two_folders(path: Path) -> Path:
    for name, key in (("documents", "article"), ("summaries", "abstract")):
        (path / name).mkdir()
        for record in RECORDS:
            with gzip.open(path / name / f"{record['id']}.txt.gz", "wb") as file:
                file.write(record[key].encode())
    return path


def as_dataset(path: Path) -> Path:
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    Dataset.from_list(RECORDS).save_to_disk(path / "saved")
    return path / "saved"


def as_sentences(path: Path) -> Path:
    split = [{**record, "article": record["article"].split("\n")} for record in RECORDS]
    return write_jsonl(path / "data.json", split)


WAYS = [as_jsonl, as_csv, as_semicolons, as_parquet, as_pairs, as_two_folders, as_dataset, as_sentences]


@pytest.mark.parametrize("way", WAYS)
def test_every_format_holds_the_same(way: Callable[[Path], Path], tmp_path: Path, tokenizer_folder: str):
    (tmp_path / "in").mkdir()
    store = run([way(tmp_path / "in")], tmp_path / "out", validation=0, tokenizer=tokenizer_folder)
    expected = sorted(RECORDS, key=lambda record: record["id"]) if "pairs" in way.__name__ else RECORDS
    expected = sorted(RECORDS, key=lambda record: record["id"]) if "folders" in way.__name__ else expected
    assert store.splits == ["train"]
    assert_holds(store, "train", expected)


def test_a_dataset_has_splits(tmp_path: Path, tokenizer_folder: str):
    from datasets import Dataset, DatasetDict
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    parts = {"train": RECORDS[:8], "validation": RECORDS[8:11], "test": RECORDS[11:]}
    dataset = DatasetDict({part: Dataset.from_list(records) for part, records in parts.items()})
    dataset.save_to_disk(tmp_path / "saved")
    store = run([tmp_path / "saved"], tmp_path / "out", format="hf", tokenizer=tokenizer_folder)
    for split, part in (("train", "train"), ("val", "validation"), ("test", "test")):
        assert_holds(store, split, parts[part])


def test_a_name_that_no_dataset_has_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.load_dataset", lambda *_: (_ for _ in ()).throw(ConnectionError("no hub\nat all")))
    done = invoke("nobody/nothing", "--format", "hf", "--output", tmp_path / "out")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "must be a dataset that can be loaded: no hub" in done.stderr


def _zstd(data: bytes) -> bytes:
    import zstandard

    half = len(data) // 2
    return zstandard.ZstdCompressor().compress(data[:half]) + zstandard.ZstdCompressor().compress(data[half:])


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data[:1000]) + gzip.compress(data[1000:]) + b"\0" * 100


COMPRESSIONS = {"gz": _gzip, "xz": lambda data: lzma.compress(data[:99]) + lzma.compress(data[99:]), "zst": _zstd}


@pytest.mark.parametrize("name", ["data.jsonl.{}", "data.jsonl", "data.{}.wrong"])
@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_the_content_says_how_it_is_compressed(kind: str, name: str, tmp_path: Path, tokenizer_folder: str):
    plain = as_jsonl(tmp_path).read_bytes()
    path = tmp_path / "in" / name.format(kind)
    path.parent.mkdir()
    path.write_bytes(COMPRESSIONS[kind](plain))
    store = run([path], tmp_path / "out", validation=0, tokenizer=tokenizer_folder)
    assert_holds(store, "train", RECORDS)


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("damage", ["cut", "cut early", "flipped"])
def test_a_compressed_file_that_is_broken_is_refused(kind: str, damage: str, tmp_path: Path, tokenizer_folder: str):
    import zstandard

    plain = b"".join(as_jsonl(tmp_path).read_bytes() for _ in range(5))
    whole = {"gz": gzip.compress, "xz": lzma.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}
    data = whole[kind](plain)
    data = {"cut": data[:-9], "cut early": data[:60], "flipped": data[:200] + bytes([data[200] ^ 4]) + data[201:]}[
        damage
    ]
    path = tmp_path / f"train.jsonl.{kind}"
    path.write_bytes(data)
    done = invoke(path, "--output", tmp_path / "out", "--on-bad-line", "skip", "--tokenizer", tokenizer_folder)
    assert done.exit_code == 2, done.output
    assert f"`{path}` must be whole, but its compression is broken" in done.stderr
    assert_nothing_is_left(tmp_path / "out")


def assert_nothing_is_left(output: Path) -> None:
    assert not output.exists()
    assert not output.with_name(f".{output.name}.preparing").exists()


@given(st.binary(max_size=300), st.integers(1, 50))
@settings(max_examples=200, deadline=None)
def test_chunks_are_whole_lines(tmp_path_factory: pytest.TempPathFactory, data: bytes, size: int):
    path = tmp_path_factory.getbasetemp() / "chunks"
    path.write_bytes(b"x" + data.replace(b"a", b"\n"))
    plain = path.read_bytes()
    found = list(chunks(path, size))
    assert b"".join(chunk.data for chunk in found) == plain
    assert all(chunk.data.endswith(b"\n") and len(chunk.data) >= size for chunk in found[:-1])
    firsts = [1 + b"".join(chunk.data for chunk in found[:i]).count(b"\n") for i in range(len(found))]
    assert [chunk.first for chunk in found] == firsts
    assert sum(chunk.read for chunk in found) == len(plain)
    path.write_bytes(gzip.compress(plain))
    assert [chunk[:2] for chunk in chunks(path, size)] == [chunk[:2] for chunk in found]


def test_arxiv_and_pubmed_as_published(tmp_path: Path):
    record = {
        "article_id": "1009.3123",
        "article_text": ["first sentence .", "second  one ."],
        "abstract_text": ["<S> what it says . </S>", "<S> a < b </S>"],
        "labels": None,
        "section_names": ["introduction"],
        "sections": [["first sentence .", "second  one ."]],
    }
    empty = {**record, "article_id": "0", "article_text": [""]}
    path = write_jsonl(tmp_path / "train.txt", [record, empty, {**record, "article_text": []}])
    store = run([path], tmp_path / "out", validation=0, on_bad_line="skip")
    assert store["train"].document_text(0) == "first sentence .\nsecond  one ."
    assert store["train"].summary_text(0) == "what it says .\na < b"
    assert store["train"][0].id == "1009.3123"
    bad = (tmp_path / "out" / "bad_lines.txt").read_text().splitlines()
    assert bad == [f"{path}:2: `article_text` is empty", f"{path}:3: `article_text` is empty"]


@pytest.mark.skipif(not (SHARED / "cohan_samples").is_dir(), reason="needs the samples of arXiv and PubMed")
def test_genuine_records_of_arxiv_and_pubmed(tmp_path: Path):
    done = invoke(SHARED / "cohan_samples", "--output", tmp_path / "out", "--vocab-size", 500, "--workers", 1)
    assert done.exit_code == 0, done.output
    assert "(cohan; document `article_text`, summary `abstract_text`, id `article_id`)" in done.stderr
    store = TokenStore.open(tmp_path / "out")
    assert {split: len(store[split]) for split in store.splits} == {"train": 4, "val": 4, "test": 4}
    for split in store.splits:
        files = sorted((SHARED / "cohan_samples").glob(f"*-{split}.txt"))
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        for i, line in enumerate(lines):
            assert store[split].document_text(i) == "\n".join(line["article_text"])
            sentences = [re.sub(r"^\s*<S>\s*|\s*</S>\s*$", "", sentence) for sentence in line["abstract_text"]]
            assert store[split].summary_text(i) == "\n".join(sentences)
            assert store[split][i].id == line["article_id"]
    store.verify()


# --------------------------------------------------------------------------------------------------------------------
# Sources: splits and columns
# --------------------------------------------------------------------------------------------------------------------


def test_splits_by_name_of_file_and_folder(tmp_path: Path):
    for name in (
        "arxiv-train.jsonl",
        "dev_1.jsonl",
        "test/part-0.jsonl",
        "validation.part.json",
        "contest-train.jsonl",
    ):
        write_jsonl(tmp_path / "in" / name, RECORDS[:1])
    (tmp_path / "in" / "vocab").write_text("not data")
    sources, unread = find_sources([str(tmp_path / "in")], [])
    found = {Path(source.path).name: source.split for source in sources}
    assert found == {
        "arxiv-train.jsonl": "train",
        "contest-train.jsonl": "train",
        "dev_1.jsonl": "val",
        "part-0.jsonl": "test",
        "validation.part.json": "val",
    }
    assert unread == [str(tmp_path / "in" / "vocab")]


def test_folders_of_text_are_splits(tmp_path: Path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        as_pairs(tmp_path / split)
    sources, _ = find_sources([str(tmp_path)], [])
    assert [(source.split, source.format) for source in sources] == [("train", "text"), ("val", "text")]


def test_splits_as_told(tmp_path: Path):
    a, b = (write_jsonl(tmp_path / name, RECORDS[:2]) for name in ("test.jsonl", "b.jsonl"))
    sources, _ = find_sources([], [("train", str(a)), ("validation", str(b))])
    assert [source.split for source in sources] == ["train", "val"]
    for wrong in ("train", "=x", "train="):
        done = invoke("--split", wrong, "--output", tmp_path / "out")
        assert (done.exit_code, done.stderr) == (2, f"pyramidion: `--split` must be NAME=PATH, got {wrong!r}.\n")


def test_sources_that_cannot_be_told_apart_are_refused(tmp_path: Path):
    train, odd = (str(write_jsonl(tmp_path / name, RECORDS[:2])) for name in ("train.jsonl", "odd.jsonl"))
    with pytest.raises(ValueError, match=r"`--split` must say what .*odd.jsonl' is for"):
        find_sources([train, odd], [])
    with pytest.raises(ValueError, match="twice"):
        find_sources([train], [("test", train)])
    with pytest.raises(ValueError, match="must exist"):
        find_sources([str(tmp_path / "nowhere.jsonl")], [])
    with pytest.raises(ValueError, match="must hold something to read"):
        find_sources([], [])
    with pytest.raises(ValueError, match="`--format` must be auto or one of"):
        find_sources([train], [], "xml")
    (tmp_path / "odd.bin").write_bytes(b"neither")
    with pytest.raises(ValueError, match=r"`--format` must say what .*odd.bin' is"):
        find_sources([str(tmp_path / "odd.bin")], [])


def test_validation_is_split_off_by_content(tmp_path: Path, tokenizer_folder: str):
    records = [article(i, words=5) for i in range(400)]
    copies = [{**record, "id": "copy", "article": record["article"].upper() + " "} for record in records[:50]]
    path = write_jsonl(tmp_path / "all.jsonl", records + copies)
    store = run([path], tmp_path / "out", validation=0.2, tokenizer=tokenizer_folder)
    assert store.splits == ["train", "val"]
    assert 0.1 < len(store["val"]) / 450 < 0.3
    ids = {split: {found.id for found in store[split]} for split in store.splits}
    assert not (ids["train"] & ids["val"]) - {"copy"}
    report = json.loads((store.path / "report.json").read_text())
    assert report["duplicates"]["across"] == {"train, val": 0}, "copies go where their original goes"
    assert sum(report["duplicates"]["within"].values()) == 50
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    again = run([path], tmp_path / "again", validation=0.2, tokenizer=tokenizer_folder)
    assert {found.id for found in again["val"]} == ids["val"]


def test_validation_that_takes_all_is_refused(tmp_path: Path):
    path = write_jsonl(tmp_path / "all.jsonl", RECORDS[:1])
    with pytest.raises(ValueError, match="`--validation` must leave something to train on"):
        run([path], tmp_path / "out", validation=0.9999)


def test_nothing_is_split_off_where_there_is_validation(folder: Path, tmp_path: Path, tokenizer_folder: str):
    store = run([folder], tmp_path / "out", validation=0.5, tokenizer=tokenizer_folder)
    assert len(store["train"]) == 31


def test_columns_by_name(tmp_path: Path, tokenizer_folder: str):
    records = [{"key1": r["id"], "body text": r["article"], "tldr": r["abstract"], "article": "decoy"} for r in RECORDS]
    path = write_jsonl(tmp_path / "in.jsonl", records)
    asked = {"document": "body text", "summary": "tldr", "id": "key1", "tokenizer": tokenizer_folder}
    assert_holds(run([path], tmp_path / "out", validation=0, **asked), "train", RECORDS)


@pytest.mark.parametrize("way", [as_jsonl, as_csv, as_parquet, as_dataset])
def test_a_column_that_is_not_there_is_refused_with_those_that_are(way: Callable[[Path], Path], tmp_path: Path):
    path = way(tmp_path)
    done = invoke(path, "--document", "body", "--output", tmp_path / "out")
    assert done.exit_code == 2
    assert re.match(
        r"pyramidion: `--document` must be a column of '.*', which are .*article.*; got 'body'\.\n$", done.stderr
    )
    done = invoke(path, "--id", "name", "--output", tmp_path / "out")
    assert done.stderr.startswith("pyramidion: `--id` must be a column of")


def test_unusual_names_are_refused(tmp_path: Path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"x": "a", "y": "b"}])
    done = invoke(path, "--output", tmp_path / "out")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "which are x, y; and none has a usual name (article_text, article, document, text" in done.stderr


def test_odd_columns_are_shown_on_one_line(tmp_path: Path):
    (tmp_path / "train.csv").write_bytes(
        b'a,"b\nc",\xff,' + b"d" * 99 + b"".join(b",x%d" % i for i in range(40)) + b"\n1\n"
    )
    done = invoke(tmp_path / "train.csv", "--output", tmp_path / "out")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert rf"which are a, 'b\nc', '\udcff', {'d' * 37}..., x0, x1" in done.stderr
    assert "x25 and 14 more; and none has a usual name" in done.stderr


def test_ids(tmp_path: Path, tokenizer_folder: str):
    records = [{**RECORDS[0], "id": value} for value in ("a", 7, None, "", 1.5, ["x"])]
    store = run(
        [write_jsonl(tmp_path / "x.jsonl", records)], tmp_path / "out", validation=0, tokenizer=tokenizer_folder
    )
    names = ["a", "7", "x.jsonl:3", "x.jsonl:4", "x.jsonl:5", "x.jsonl:6"]
    assert [found.id for found in store["train"]] == names
    with pytest.raises(BadLines) as caught:
        run([tmp_path / "x.jsonl"], tmp_path / "two", validation=0, id="id", tokenizer=tokenizer_folder)
    assert [line.rpartition("x.jsonl")[2] for line in caught.value.shown] == [
        ":3: `id` must be a text or a number, got null",
        ":4: `id` must be a text or a number, got an empty one",
        ":5: `id` must be a text or a number, got a number",
        ":6: `id` must be a text or a number, got a list",
    ]


# --------------------------------------------------------------------------------------------------------------------
# Bad lines
# --------------------------------------------------------------------------------------------------------------------

GOOD = json.dumps({"article": "good text", "abstract": "good"}).encode()
BAD_JSON: list[tuple[bytes, str]] = [
    (b'{"article": "a", "abstract": "b"', "broken JSON: Expecting ',' delimiter at character 33"),
    (b"nonsense", "broken JSON: Expecting value at character 1"),
    (b'["a", "b"]', "must be a JSON object, got a list"),
    (b'"text"', "must be a JSON object, got a text"),
    (b"null", "must be a JSON object, got null"),
    (b"17", "must be a JSON object, got a number"),
    (b"", "the line is empty"),
    (b"  \t ", "the line is empty"),
    (b'{"article": "a"}', "`abstract` is missing"),
    (b'{"abstract": "a"}', "`article` is missing"),
    (b'{"article": null, "abstract": "b"}', "`article` must be a text or a list of texts, got null"),
    (b'{"article": 3.5, "abstract": "b"}', "`article` must be a text or a list of texts, got a number"),
    (b'{"article": true, "abstract": "b"}', "`article` must be a text or a list of texts, got true or false"),
    (b'{"article": {"x": 1}, "abstract": "b"}', "`article` must be a text or a list of texts, got an object"),
    (b'{"article": ["a", 1], "abstract": "b"}', "`article` must be a list of texts, but a number is in it"),
    (b'{"article": ["a", null], "abstract": "b"}', "`article` must be a list of texts, but null is in it"),
    (b'{"article": ["a", ["b"]], "abstract": "b"}', "`article` must be a list of texts, but a list is in it"),
    (b'{"article": "", "abstract": "b"}', "`article` is empty"),
    (b'{"article": [], "abstract": "b"}', "`article` is empty"),
    (b'{"article": "a", "abstract": " \\n\\u3000\\t"}', "`abstract` is empty"),
    (b'{"article": "a\xff", "abstract": "b"}', "bad UTF-8 at byte 15"),
    (b'{"article": "a\xed\xa0\x80", "abstract": "b"}', "bad UTF-8 at byte 15"),
    (b'{"article": "ab\\ud800c", "abstract": "b"}', "`article` holds a lone surrogate at character 3"),
    (b'{"article": "a\x00", "abstract": "b"}', "broken JSON: Invalid control character at character 15"),
    (b'{"article": "a", "abstract": "b"} {}', "broken JSON: Extra data at character 35"),
    (b'{"x": ' + b"9" * 5000 + b"}", "broken JSON: Exceeds the limit"),
    (b"[" * 100_000, "broken JSON: "),
    (GOOD[:-1] + b"\r" + GOOD, "broken JSON: "),
]


def test_every_bad_line_is_listed_with_its_place_and_reason(tmp_path: Path, tokenizer_folder: str):
    lines = [line for bad, _ in BAD_JSON for line in (GOOD, bad)]
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    store = run([path], tmp_path / "out", validation=0, on_bad_line="skip", tokenizer=tokenizer_folder)
    assert len(store["train"]) == len(BAD_JSON)
    listed = (store.path / "bad_lines.txt").read_text().splitlines()
    assert len(listed) == len(BAD_JSON)
    for i, (line, (_, reason)) in enumerate(zip(listed, BAD_JSON, strict=True)):
        assert line.startswith(f"{path}:{2 * i + 2}: {reason}"), line
    report = json.loads((store.path / "report.json").read_text())
    assert report["bad_lines"]["total"] == report["splits"]["train"]["bad_lines"] == len(BAD_JSON)
    assert sum(report["bad_lines"]["reasons"].values()) == len(BAD_JSON)
    assert report["bad_lines"]["reasons"]["bad UTF-8"] == 2
    store.verify()


def test_lines_are_counted_across_chunks(tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyramidion.data.formats.chunks", lambda path, size=0: chunks(path, 90))
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join([GOOD, GOOD, GOOD, b"x", GOOD, b"", GOOD, GOOD, b"y"]))
    store = run([path], tmp_path / "out", validation=0, on_bad_line="skip", tokenizer=tokenizer_folder)
    listed = (store.path / "bad_lines.txt").read_text()
    assert re.findall(r"jsonl:(\d+): ", listed) == ["4", "6", "9"]
    assert [found.id.partition(":")[2] for found in store["train"]] == ["1", "2", "3", "5", "7", "8"]


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_fail_unless_they_are_skipped(workers: int, tmp_path: Path, tokenizer_folder: str):
    train = tmp_path / "train.jsonl"
    train.write_bytes(b"\n".join([GOOD] * 50 + [b"x"] * 30))
    (tmp_path / "val.jsonl").write_bytes(b"y\n" + GOOD)
    chosen = ["--tokenizer", tokenizer_folder] if workers == 2 else ["--vocab-size", 300]
    done = invoke(tmp_path, "--output", tmp_path / "out", "--workers", workers, *chosen)
    assert done.exit_code == 2
    assert_nothing_is_left(tmp_path / "out")
    *heads, last = done.stderr.splitlines()
    shown = [line for line in heads if "broken JSON" in line]
    assert shown == [f"{train}:{n}: broken JSON: Expecting value at character 1" for n in range(51, 71)]
    listed = tmp_path / "out.bad_lines.txt"
    assert last == (
        f"pyramidion: `SOURCES` must be free of bad lines, got 31 bad lines, listed in {listed}; "
        "`--on-bad-line skip` goes on without them."
    )
    assert listed.read_text().count("\n") == 31
    assert f"{tmp_path / 'val.jsonl'}:1: broken JSON" in listed.read_text()
    done = invoke(tmp_path, "--output", tmp_path / "out", "--workers", 1, "--on-bad-line", "skip", *chosen)
    assert done.exit_code == 0, done.output
    assert "Left out: 31 × broken JSON: Expecting value (bad_lines.txt)." in done.stdout
    assert not listed.exists()
    assert len(TokenStore.open(tmp_path / "out")["train"]) == 50


def test_nothing_good_is_an_error_even_when_bad_lines_are_skipped(tmp_path: Path, tokenizer_folder: str):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"x\n\ny\n")
    for chosen in (["--tokenizer", tokenizer_folder], []):
        done = invoke(path, "--output", tmp_path / "out", "--on-bad-line", "skip", "--workers", 1, *chosen)
        assert done.exit_code == 2
        assert "must hold a good line, got 3 bad lines" in done.stderr
        assert f"{path}:2: the line is empty" in done.stderr
        assert_nothing_is_left(tmp_path / "out")


CSV_LINES: list[tuple[bytes, str | None]] = [
    (b"one,first", None),
    (b"only", "the row has 1 columns, the header 2"),
    (b"a,b,c", "the row has 3 columns, the header 2"),
    (b'"quoted\nnew\nline, and comma","second ""one"""', None),
    (b"", "the line is empty"),
    (b",x", "`article` is empty"),
    (b"bad \xff byte,x", "bad UTF-8 in `article`"),
    (b"fine,bad \xc3(", "bad UTF-8 in `abstract`"),
    (b'"a"b,c', "broken CSV: "),
    (b"nul \x00,third", None),
]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_csv_rows_are_numbered_by_the_line_they_begin_on(end: bytes, tmp_path: Path, tokenizer_folder: str):
    path = tmp_path / "train.csv"
    path.write_bytes(BOM + b"article,abstract" + end + end.join(line for line, _ in CSV_LINES) + end)
    store = run([path], tmp_path / "out", validation=0, on_bad_line="skip", tokenizer=tokenizer_folder)
    texts = [(store["train"].document_text(i), store["train"].summary_text(i)) for i in range(len(store["train"]))]
    assert texts == [("one", "first"), ("quoted\nnew\nline, and comma", 'second "one"'), ("nul \0", "third")]
    listed = (store.path / "bad_lines.txt").read_text().splitlines()
    expected = [
        (number, reason) for number, (_, reason) in zip([2, 3, 4, 5, 8, 9, 10, 11, 12, 13], CSV_LINES, strict=True)
    ]
    for line, (number, reason) in zip(listed, [pair for pair in expected if pair[1]], strict=True):
        assert line.startswith(f"{path}:{number}: {reason}"), line
    assert [found.id for found in store["train"]] == ["train.csv:2", "train.csv:5", "train.csv:13"]


def test_a_quote_that_is_never_closed_is_a_bad_line(tmp_path: Path, tokenizer_folder: str):
    path = tmp_path / "train.csv"
    path.write_bytes(b'article,abstract\na,b\n"c,d\ne,f\n')
    store = run([path], tmp_path / "out", validation=0, on_bad_line="skip", tokenizer=tokenizer_folder)
    assert (store.path / "bad_lines.txt").read_text() == f"{path}:3: broken CSV: unexpected end of data\n"


def test_parquet_rows_are_numbered(tmp_path: Path, tokenizer_folder: str):
    import pyarrow
    import pyarrow.parquet

    numbers = pyarrow.table({"text": [[3]], "summary": [4]})
    pyarrow.parquet.write_table(numbers, tmp_path / "numbers.parquet")
    with pytest.raises(BadLines) as caught:
        run([tmp_path / "numbers.parquet"], tmp_path / "out", tokenizer=tokenizer_folder)
    assert caught.value.shown[0].endswith("numbers.parquet:1: `text` must be a list of texts, but a number is in it")
    kept = pyarrow.array([b"\xef\xbb\xbfkept", b"bad \xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": kept, "summary": ["x", "y"]}), tmp_path / "bytes.parquet")
    bytes_ = run(
        [tmp_path / "bytes.parquet"], tmp_path / "b", validation=0, on_bad_line="skip", tokenizer=tokenizer_folder
    )
    assert bytes_["train"].document_text(0) == "\ufeffkept"
    assert (tmp_path / "b" / "bad_lines.txt").read_text() == f"{tmp_path}/bytes.parquet:2: bad UTF-8 at byte 5\n"
    rows = {"text": [["a", "b"], None, [""], ["c"]], "summary": ["x", "y", "z", None]}
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    store = run([path], tmp_path / "out", validation=0, on_bad_line="skip", tokenizer=tokenizer_folder)
    assert store["train"].document_text(0) == "a\nb"
    assert (store.path / "bad_lines.txt").read_text().splitlines() == [
        f"{path}:2: `text` must be a text or a list of texts, got null",
        f"{path}:3: `text` is empty",
        f"{path}:4: `summary` must be a text or a list of texts, got null",
    ]


def test_texts_without_a_partner_are_bad(tmp_path: Path, tokenizer_folder: str):
    place = tmp_path / "in"
    place.mkdir()
    for name, data in {
        "a.txt": BOM + b"with \r\n returns\x00",
        "a.summary.txt": b"fine",
        "b.txt": b"alone",
        "c.summary.txt": b"alone",
        "d.txt": b"bad \xff",
        "d.summary.txt": b"fine",
        "e.txt": b" \n",
        "e.summary.txt": b"fine",
    }.items():
        (place / name).write_bytes(data)
    store = run([place], tmp_path / "out", validation=0, on_bad_line="skip", tokenizer=tokenizer_folder)
    assert store["train"].document_text(0) == "with \r\n returns\x00"
    assert store["train"][0].id == "a"
    assert (store.path / "bad_lines.txt").read_text().splitlines() == [
        f"{place}/b.txt:1: no summary: b.summary.txt is missing",
        f"{place}/c.summary.txt:1: no document to this summary",
        f"{place}/d.txt:1: bad UTF-8 at byte 5",
        f"{place}/e.txt:1: `document` is empty",
    ]


def test_bom_crlf_and_a_long_line_are_fine(tmp_path: Path, tokenizer_folder: str):
    long = {"article": "x y " * 250_000 + "é" * 10, "abstract": "nul \u0000 kept"}
    path = tmp_path / "train.jsonl"
    path.write_bytes(BOM + GOOD + b"\r\n" + json.dumps(long).encode() + b"\r\n" + GOOD)
    store = run([path], tmp_path / "out", validation=0, tokenizer=tokenizer_folder)
    assert [store["train"].document_text(i) for i in range(3)] == ["good text", long["article"], "good text"]
    assert store["train"].summary_text(1) == "nul \0 kept"
    assert store.tokenizer().decode(store["train"][1].document.tolist()) == long["article"]


EMPTY = {
    "train.jsonl": b"",
    "train.jsonl.gz": gzip.compress(b""),
    "train.csv": BOM,
    "train.parquet": b"",
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_file_is_an_error_that_says_so(name: str, tmp_path: Path, folder: Path):
    (tmp_path / name).write_bytes(EMPTY[name])
    for on_bad_line in ("fail", "skip"):
        done = invoke(folder, tmp_path / name, "--output", tmp_path / "out", "--on-bad-line", on_bad_line)
        assert (done.exit_code, done.stderr.splitlines()[-1]) == (
            2,
            f"pyramidion: `{tmp_path / name}` must hold something, but it is empty.",
        )
        assert_nothing_is_left(tmp_path / "out")


def test_a_table_without_rows_is_an_error(tmp_path: Path, folder: Path, tokenizer_folder: str):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "train.csv").write_text("article,abstract\n")
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array([], "string"), "summary": []}), tmp_path / "t.parquet"
    )
    for name, chosen in product(("train.csv", "t.parquet"), ([], ["--tokenizer", tokenizer_folder])):
        named = ["--split", f"train={tmp_path / name}"]
        done = invoke(*named, "--output", tmp_path / "out", *chosen, "--workers", 1)
        assert (done.exit_code, done.stderr.splitlines()[-1]) == (
            2,
            f"pyramidion: `{tmp_path / name}` must hold something, but it has no records.",
        )
        assert_nothing_is_left(tmp_path / "out")


WRONG_FILES = {
    "broken.parquet": (b"PAR1 and nothing else", "must be a whole Parquet file"),
    "text.parquet": (b"no parquet at all", "must be a whole Parquet file"),
    "header.csv": (b"\n1,2\n", "must begin with a header"),
    "image.png": (b"\x89PNG", "neither its name nor its content does"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_one_line(name: str, tmp_path: Path):
    data, reason = WRONG_FILES[name]
    (tmp_path / name).write_bytes(data)
    done = invoke(tmp_path / name, "--output", tmp_path / "out")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
    assert done.stderr.startswith("pyramidion: `")
    assert reason in done.stderr


def test_a_folder_without_texts_is_one_line(tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.md").write_text("nothing")
    done = invoke(tmp_path / "in", "--output", tmp_path / "out")
    rule = "must hold files to read, such as NAME.txt and NAME.summary.txt; it has none."
    assert (done.exit_code, done.stderr) == (2, f"pyramidion: `{tmp_path / 'in'}` {rule}\n")


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--workers", 0, "`--workers` must be at least 1, got 0."),
        ("--max-source", 0, "`--max-source` must be at least 1, got 0."),
        ("--vocab-size", 259, "`--vocab-size` must be at least 260, got 259."),
        ("--validation", 1, "`--validation` must be at least 0 and below 1, got 1.0."),
        ("--on-bad-line", "hide", "`--on-bad-line` must be fail or skip, got 'hide'."),
    ],
)
def test_wrong_options_are_refused(option: str, value: Any, rule: str, folder: Path, tmp_path: Path):
    done = invoke(folder, "--output", tmp_path / "out", option, value)
    assert (done.exit_code, done.stderr) == (2, f"pyramidion: {rule}\n")


def test_no_training_split_needs_a_tokenizer(folder: Path, tmp_path: Path, tokenizer_folder: str):
    done = invoke(folder / "test.jsonl", "--output", tmp_path / "out")
    assert "`--tokenizer` must be given where there is no training split" in done.stderr
    done = invoke(folder / "test.jsonl", "--output", tmp_path / "out", "--tokenizer", tokenizer_folder, "--workers", 1)
    assert done.exit_code == 0
    assert TokenStore.open(tmp_path / "out").splits == ["test"]


# --------------------------------------------------------------------------------------------------------------------
# Whole or not at all
# --------------------------------------------------------------------------------------------------------------------


def test_a_finished_store_is_not_overwritten(folder: Path, tmp_path: Path, tokenizer_folder: str):
    first = run([folder / "test.jsonl"], tmp_path / "out", tokenizer=tokenizer_folder)
    arguments = (folder / "valid.jsonl", "--output", tmp_path / "out", "--tokenizer", tokenizer_folder, "--workers", 1)
    done = invoke(*arguments)
    assert (done.exit_code, "a finished store; `--force` replaces it" in done.stderr) == (2, True)
    assert TokenStore.open(tmp_path / "out").fingerprint == first.fingerprint
    assert invoke(*arguments, "--force").exit_code == 0
    assert TokenStore.open(tmp_path / "out").splits == ["val"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_does_not_delete_what_is_not_a_store(folder: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    done = invoke(folder, "--output", tmp_path / "out", "--force")
    assert (done.exit_code, "which is not a store" in done.stderr) == (2, True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


def test_a_failure_with_force_keeps_the_old_store(folder: Path, tmp_path: Path, tokenizer_folder: str):
    first = run([folder / "test.jsonl"], tmp_path / "out", tokenizer=tokenizer_folder)
    (tmp_path / "train.jsonl").write_bytes(GOOD + b"\nbroken")
    with pytest.raises(BadLines):
        run([tmp_path / "train.jsonl"], tmp_path / "out", tokenizer=tokenizer_folder, force=True)
    again = TokenStore.open(tmp_path / "out")
    again.verify()
    assert again.fingerprint == first.fingerprint


def test_a_disk_that_is_full_leaves_nothing(
    folder: Path, tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyramidion.data.writer.ShardedFile.write", full)
    done = invoke(folder, "--output", tmp_path / "out", "--tokenizer", tokenizer_folder, "--workers", 1)
    assert (done.exit_code, "No space left on device" in done.stderr) == (2, True)
    assert "Traceback" not in done.output
    assert_nothing_is_left(tmp_path / "out")


def test_two_at_once_are_refused(folder: Path, tmp_path: Path, tokenizer_folder: str):
    from pyramidion.data.writer import staging

    with staging(tmp_path / "out") as place:
        with pytest.raises(ValueError, match="must not be in preparation already"):
            run([folder], tmp_path / "out", tokenizer=tokenizer_folder)
        assert (place / "lock").exists()
        (place / "manifest.json").write_text("{}")
    assert (tmp_path / "out" / "manifest.json").read_text() == "{}"


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-c", "from pyramidion.cli import main; main()", "prepare", *map(str, arguments)]


def test_killed_halfway_leaves_nothing_that_opens(tmp_path: Path, tokenizer_folder: str):
    line = json.dumps({"article": ESSAY * 40, "abstract": "short"}).encode() + b"\n"
    (tmp_path / "train.jsonl").write_bytes(line * (60_000_000 // len(line)))
    output, place = tmp_path / "out", tmp_path / ".out.preparing"
    arguments = (tmp_path / "train.jsonl", "--output", output, "--validation", 0, "--tokenizer", tokenizer_folder)
    running = subprocess.Popen(
        command(*arguments), env=ENVIRONMENT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    begun = place / "train" / "tokens-00000.bin"
    while not (begun.exists() and begun.stat().st_size):
        assert running.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    children = _children(running.pid)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert children
    assert not output.exists()
    with pytest.raises(ValueError, match=r"it has no manifest\.json"):
        TokenStore.open(place)
    for _ in range(300):
        if not any(map(_is_alive, children)):
            break
        time.sleep(0.05)
    assert not any(map(_is_alive, children)), "workers must end with their parent"
    (tmp_path / "train.jsonl").write_bytes(line)
    assert len(run([tmp_path / "train.jsonl"], output, validation=0, tokenizer=tokenizer_folder)["train"]) == 1
    assert not place.exists()


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _is_alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_opening_reads_only_the_manifest(finished: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    original = io.open

    def noted(file: Any, *arguments: Any, **named: Any) -> Any:
        opened.append(Path(file).name)
        return original(file, *arguments, **named)

    monkeypatch.setattr(io, "open", noted)
    TokenStore.open(finished)
    assert opened == ["manifest.json"]


def every_file(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
def test_damage_to_any_file_is_found_and_named(finished: Path, tmp_path: Path, damage: str):
    broken = tmp_path / "broken"
    shutil.copytree(finished, broken)
    names = every_file(broken)
    assert {"manifest.json", "report.json", "lengths.png", "tokenizer/tokenizer.json", "val/tokens-00000.bin"} <= {
        *names
    }
    assert len(names) == 23
    for name in names:
        path = broken / name
        data = path.read_bytes()
        if damage == "remove":
            path.unlink()
        else:
            middle = len(data) // 2
            flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            path.write_bytes({"flip": flipped, "cut": data[:-1], "grow": data + b"\n"}[damage])
        with pytest.raises(ValueError) as caught:
            TokenStore.open(broken).verify()
        assert Path(name).name in str(caught.value)
        path.write_bytes(data)
        TokenStore.open(broken).verify()


def test_opening_alone_finds_what_is_cut_or_missing(finished: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(finished, broken)
    path = broken / "train" / "text-00000.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=rf"text-00000.bin` must have {len(data)} bytes, got {len(data) - 1}"):
        TokenStore.open(broken)
    path.unlink()
    with pytest.raises(ValueError, match=r"text-00000.bin` must be there, but it is missing"):
        TokenStore.open(broken)


@pytest.mark.parametrize("place", range(0, 4000, 97))
def test_any_bit_of_the_manifest_matters(finished: Path, tmp_path: Path, place: int):
    data = bytearray((finished / "manifest.json").read_bytes())
    data[place % len(data)] ^= 2
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"manifest.json` must be as it was written"):
        TokenStore.open(tmp_path)


def test_another_version_is_refused(finished: Path, tmp_path: Path):
    from pyramidion.data.store import manifest_bytes

    manifest = json.loads((finished / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_bytes(manifest_bytes({**manifest, "version": 2}))
    with pytest.raises(ValueError, match="must be of version 1, got 2"):
        TokenStore.open(tmp_path)
    with pytest.raises(ValueError, match="made by `pyramidion prepare`"):
        TokenStore.open(tmp_path / "nowhere")


def test_the_fingerprint_is_that_of_the_data(folder: Path, finished: Path, tmp_path: Path, tokenizer_folder: str):
    first = TokenStore.open(finished).fingerprint
    assert re.fullmatch(r"[0-9a-f]{64}", first)
    shutil.copytree(folder, tmp_path / "moved")
    same = run([tmp_path / "moved"], tmp_path / "same", tokenizer=tokenizer_folder, max_source=5)
    assert same.fingerprint == first, "neither places nor what only the report is about"
    changed = article(40)
    changed["abstract"] += "."
    write_jsonl(tmp_path / "moved" / "test.jsonl", [article(38), article(39), changed, article(41), article(42)])
    assert run([tmp_path / "moved"], tmp_path / "other", tokenizer=tokenizer_folder).fingerprint != first


# --------------------------------------------------------------------------------------------------------------------
# The report
# --------------------------------------------------------------------------------------------------------------------


def test_the_report_counts(folder: Path, tmp_path: Path, store: TokenStore, drawn: None):
    limit = int(np.sort(store["train"].document_lengths)[15])  # with its end token it is one too long
    done = invoke(folder, "--output", tmp_path / "out", "--vocab-size", 300, "--max-source", limit, "--workers", 1)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    for split in store.splits:
        documents, told = store[split].document_lengths, report["splits"][split]
        assert told["documents"] == len(documents)
        assert told["document_tokens"] == documents.sum()
        assert told["document"]["median"] == np.median(documents)
        assert told["document"]["p95"] == np.percentile(documents, 95)
        assert told["document"]["max"] == documents.max()
        assert told["truncated"] == np.mean(documents + 1 > limit)
        histogram = told["document"]["histogram"]
        assert sum(histogram["counts"]) == len(documents)
        assert histogram["edges"][0] <= documents.min() <= documents.max() <= histogram["edges"][-1]
    assert re.search(r"^train +31 ", done.stdout, re.MULTILINE)
    assert f"over {limit:,}" in done.stdout
    assert re.search(r"MB of text in .* MB/s", done.stdout)
    assert (tmp_path / "out" / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_duplicates_within_and_across(tmp_path: Path, tokenizer_folder: str):
    first, second, third = (article(i) for i in range(3))
    shouted = {**first, "id": "loud", "article": "\n\n" + first["article"].upper().replace(" ", "  ")}
    write_jsonl(tmp_path / "train.jsonl", [first, second, shouted, {**first, "id": "again"}])
    write_jsonl(tmp_path / "test.jsonl", [third, {**second, "id": "leak"}, {**first, "id": "leak too"}])
    done = invoke(
        tmp_path, "--output", tmp_path / "out", "--validation", 0, "--tokenizer", tokenizer_folder, "--workers", 1
    )
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["duplicates"] == {"within": {"train": 2, "test": 0}, "across": {"train, test": 2}}
    assert "Duplicates across train and test: 2 (duplicates.jsonl)." in done.stdout
    listed = [json.loads(line) for line in (tmp_path / "out" / "duplicates.jsonl").read_text().splitlines()]
    found = sorted([[(one["split"], one["index"], one["id"]) for one in group] for group in listed])
    assert found == [
        [("train", 0, "doc-0"), ("train", 2, "loud"), ("train", 3, "again"), ("test", 2, "leak too")],
        [("train", 1, "doc-1"), ("test", 1, "leak")],
    ]


@pytest.mark.parametrize("room", [1 << 18, 40])
def test_sentences_that_many_summaries_share_are_told(
    room: int, tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch
):
    """Also where there is no room to count all at once, and one that is just frequent enough is lowered by one."""
    monkeypatch.setattr(data_report, "ROOM", room)
    often, seldom = "This article was edited by the Editor.", "That one was not edited by him."
    records = [{**article(i), "abstract": f"Finding number {i} is a new one here. We saw it."} for i in range(60)]
    for record in records[:40]:
        record["abstract"] += f" {often}  {often}"
    records[50]["abstract"] += " THIS article was  edited\nby the Editor."
    for record in records[45:49]:
        record["abstract"] += f" {seldom}"
    for record in records[:5]:
        record["abstract"] += " Five of them have this one too."
    write_jsonl(tmp_path / "train.jsonl", records)
    done = invoke(
        tmp_path, "--output", tmp_path / "out", "--validation", 0, "--tokenizer", tokenizer_folder, "--workers", 1
    )
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rare = {"summaries": 5, "sentence": "Five of them have this one too."}
    assert report["shared"] == {"train": [{"summaries": 41, "sentence": often}, rare]}
    assert f"One sentence in 41 summaries of train, to be learnt by heart: {often}" in done.stdout


def test_without_matplotlib_there_is_a_note(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: None):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoke(folder, "--output", tmp_path / "out", "--vocab-size", 300, "--workers", 1)
    assert done.exit_code == 0, done.output
    assert "No figure of lengths: pip install matplotlib." in done.stdout
    assert not (tmp_path / "out" / "lengths.png").exists()
    TokenStore.open(tmp_path / "out").verify()


def test_a_package_that_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "train.jsonl"
    path.write_bytes(_zstd(GOOD))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    done = invoke(path, "--output", tmp_path / "out")
    assert done.exit_code == 2
    assert "needs zstandard for this: pip install 'pyramidion[train]'" in done.stderr


# --------------------------------------------------------------------------------------------------------------------
# Batches
# --------------------------------------------------------------------------------------------------------------------

SIZES = {
    "lengths": st.integers(1, 120).map(lambda n: [i * i * 7 % 301 for i in range(n)]),
    "batch_size": st.integers(1, 9),
    "groups": st.integers(1, 7),
    "world": st.integers(1, 7),
    "seed": st.integers(0, 2**40),
    "epoch": st.integers(0, 5),
}


@given(**SIZES)
@settings(max_examples=300, deadline=None)
@example(lengths=[3] * 13, batch_size=3, groups=2, world=4, seed=0, epoch=0)  # the last step has 1 for 4 ranks
@example(lengths=[3] * 5, batch_size=1, groups=2, world=4, seed=0, epoch=0)  # and nothing can be lent
@example(lengths=[3] * 2, batch_size=3, groups=2, world=5, seed=0, epoch=0)
def test_every_example_is_in_one_batch(
    lengths: list[int], batch_size: int, groups: int, world: int, seed: int, epoch: int
):
    told = {"seed": seed, "epoch": epoch, "groups": groups, "world": world}
    ranks = [LengthGroupedBatches(lengths, batch_size, rank=rank, **told) for rank in range(world)]
    assert {len(batches) for batches in ranks} == {-(-len(lengths) // (batch_size * world))}
    counts = Counter(i for batches in ranks for batch in batches for i in batch)
    assert set(counts) == set(range(len(lengths)))
    rest = len(lengths) % (batch_size * world)
    lent = batch_size > 1 and len(lengths) > world
    repeated = 0 if rest == 0 or rest >= world or lent else world - rest
    assert counts.total() == len(lengths) + repeated
    sizes = [[len(batch) for batch in batches] for batches in ranks]
    assert all(1 <= size <= batch_size for rank in sizes for size in rank)
    assert all(size == batch_size for rank in sizes for size in rank[:-2])
    if rest == 0 or rest >= world:
        assert all(size == batch_size for rank in sizes for size in rank[:-1])
    for step in zip(*sizes, strict=True):
        assert max(step) - min(step) <= 1


@given(**SIZES)
@settings(max_examples=100, deadline=None)
def test_batches_are_a_function_of_seed_and_epoch(
    lengths: list[int], batch_size: int, groups: int, world: int, seed: int, epoch: int
):
    told = {"seed": seed, "groups": groups, "world": world, "rank": world - 1}
    batches = LengthGroupedBatches(lengths, batch_size, epoch=epoch, **told)
    whole = list(batches)
    assert whole == [batches[i] for i in range(len(batches))] == batches[:]
    again = LengthGroupedBatches(np.array(lengths, dtype=np.uint32), batch_size, **told)
    again.set_epoch(epoch + 1)
    again.set_epoch(epoch)
    for skipped in range(len(whole) + 1):
        assert again[skipped:] == whole[skipped:]


def test_epochs_and_seeds_differ():
    lengths = list(range(1000))
    batches = LengthGroupedBatches(lengths, 8, seed=1)
    first = list(batches)
    batches.set_epoch(1)
    assert list(batches) != first
    assert list(LengthGroupedBatches(lengths, 8, seed=2)) != first
    assert list(LengthGroupedBatches(lengths, 8, seed=1)) == first


def padded(lengths: np.ndarray, batches: Sequence[Sequence[int]]) -> float:
    """Return the share of a batch that is padding."""
    return 1 - lengths.sum() / sum(len(batch) * lengths[list(batch)].max() for batch in batches)


def test_batches_hold_documents_of_like_length():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(9, 0.7, 5000).astype(np.uint32)
    grouped = LengthGroupedBatches(lengths, 8, seed=0)
    shuffled = LengthGroupedBatches(lengths, 8, seed=0, groups=1)
    assert padded(lengths, grouped) < 0.06
    assert padded(lengths, shuffled) > 0.4
    means = np.array([lengths[batch].mean() for batch in grouped])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.15, "long batches must not come together"
    ranks = [LengthGroupedBatches(lengths, 4, seed=0, rank=rank, world=2) for rank in range(2)]
    longest = np.array([[lengths[batch].max() for batch in batches] for batches in ranks], dtype=float)
    assert np.mean(longest.min(0) / longest.max(0)) > 0.97, "no rank waits for another"


@pytest.mark.parametrize(
    ("named", "rule"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0."),
        ({"groups": 0}, "`groups` must be at least 1, got 0."),
        ({"world": 0}, "`world` must be at least 1, got 0."),
        ({"rank": 2, "world": 2}, "`rank` must be from 0 to 1, got 2."),
        ({"epoch": -1}, "`epoch` must be at least 0, got -1."),
        ({"seed": -1}, "`seed` must be at least 0, got -1."),
        ({"lengths": []}, "`lengths` must hold at least one, got none."),
    ],
)
def test_wrong_batches_are_refused(named: dict[str, Any], rule: str):
    with pytest.raises(ValueError, match=re.escape(rule)):
        LengthGroupedBatches(**{"lengths": [1, 2, 3], "batch_size": 2, "seed": 0, **named})


# --------------------------------------------------------------------------------------------------------------------
# The collator
# --------------------------------------------------------------------------------------------------------------------


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_a_batch_by_hand():
    examples = [Example(ids(11, 12, 13), ids(21), "a"), Example(ids(14), ids(22, 23, 24, 25), "b")]
    batch = Collator(pad=0, eos=2, max_source=8, max_target=4)(examples)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert batch["input_ids"].tolist() == [[11, 12, 13, 2], [14, 2, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[21, 2, -100, -100], [22, 23, 24, 2]]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    short = Collator(pad=7, eos=9, max_source=3, max_target=1)(examples)
    assert short["input_ids"].tolist() == [[11, 12, 9], [14, 9, 7]]
    assert short["labels"].tolist() == [[9], [9]]


def test_documents_may_be_filled_up_to_whole_blocks():
    examples = [Example(ids(11, 12, 13), ids(21), "a"), Example(ids(14), ids(22), "b")]
    batch = Collator(pad=0, eos=2, max_source=8, max_target=4, whole=3)(examples)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 2, 0, 0], [14, 2, 0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[21, 2], [22, 2]]
    with pytest.raises(ValueError, match="`whole` must be at least 1, got 0"):
        Collator(whole=0)


def test_an_exact_fit_is_not_cut():
    batch = Collator(max_source=4, max_target=3)([Example(ids(5, 6, 7), ids(8, 9), "a")])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 2]]
    assert batch["labels"].tolist() == [[8, 9, 2]]


def test_a_padding_token_inside_a_text_is_real():
    batch = Collator(pad=5)([Example(ids(5, 5), ids(5), "a"), Example(ids(6, 6, 6), ids(6), "b")])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_a_batch_of_a_store_trains_a_model(store: TokenStore):
    from pyramidion.modeling_pyramidion import PyramidionForConditionalGeneration
    from pyramidion.presets import preset

    train = store["train"]
    batches = LengthGroupedBatches(train.document_lengths, 3, seed=0)
    batch = Collator(max_source=96, max_target=16)([train[i] for i in batches[0]])
    model = PyramidionForConditionalGeneration(preset("tiny-pyramidion", vocab_size=store.vocab_size))
    assert torch.isfinite(model(**batch).loss)


def test_wrong_collators_are_refused():
    with pytest.raises(ValueError, match="`max_source` must be at least 1, got 0"):
        Collator(max_source=0)
    with pytest.raises(ValueError, match="`examples` must hold at least one"):
        Collator()([])


# --------------------------------------------------------------------------------------------------------------------
# Size and speed
# --------------------------------------------------------------------------------------------------------------------


def peak(tmp_path: Path, megabytes: int, tokenizer: str) -> float:
    """Prepare a corpus of so many megabytes in a fresh process and return the most memory it took, in MB."""
    path = tmp_path / f"train-{megabytes}.jsonl"
    rng = random.Random(0)
    with path.open("w") as file:
        while file.tell() < megabytes << 20:
            text = " ".join(f"{rng.randrange(10**7):x}" for _ in range(20_000))
            file.write(json.dumps({"article": text, "abstract": "short"}) + "\n")
    arguments = command(path, "--output", tmp_path / f"out-{megabytes}", "--tokenizer", tokenizer, "--workers", 1)
    code = "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], capture_output=True, text=True);"
    code += (
        "assert not done.returncode, done.stderr; print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch):
    """Words never repeat here, so that what is remembered of them is nearly full in the smaller corpus already.

    To keep the text and its tokens would take some 56 MB more.
    """
    small, large = (peak(tmp_path, megabytes, tokenizer_folder) for megabytes in (10, 24))
    assert large < small + 42, (small, large)


@pytest.mark.slow
def test_a_large_store_opens_at_once(tmp_path: Path, tokenizer_folder: str):
    line = json.dumps({"article": ESSAY * 50, "abstract": "short"}) + "\n"
    (tmp_path / "train.jsonl").write_text(line * (100_000_000 // len(line)))
    store = run([tmp_path / "train.jsonl"], tmp_path / "out", validation=0, tokenizer=tokenizer_folder)
    began = time.perf_counter()
    again = TokenStore.open(store.path)
    assert time.perf_counter() - began < 0.05
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert again["train"][-1].id == f"train.jsonl:{len(again['train'])}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10, "one example is read, not a shard"


def test_training_twice_gives_the_same_tokenizer():
    texts = [article(i)["article"] for i in range(40)]
    first, second = (train_tokenizer(iter(texts), 400).backend_tokenizer.to_str() for _ in range(2))
    assert first == second
