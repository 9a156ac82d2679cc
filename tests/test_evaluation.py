"""Scores to rely on: ROUGE by hand and by its library, honest intervals, baselines, runs that survive kills."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer
from typer.testing import CliRunner

import pyramidion.data
from pyramidion.cli import main
from pyramidion.evaluation import (
    bootstrap,
    lead,
    lexrank,
    paired_bootstrap,
    repetition,
    rouge,
    script_warning,
    sentences,
)
from pyramidion.evaluation.baselines import centrality
from pyramidion.evaluation.overlap import KINDS, by_lines, unseen
from pyramidion.evaluation.run import fingerprint, read_predictions
from pyramidion.evaluation.scores import pair
from pyramidion.evaluation.splitting import LONG, by_rule
from pyramidion.generation import Summarizer
from pyramidion.generation.journal import read_rows
from test_generation import ENVIRONMENT, kill_when, make_text, make_tokenizer, write_model

DOCUMENT = (Path(pyramidion.data.__file__).parents[1] / "assets" / "document.txt").read_text()


def one_rouge(prediction: str, reference: str) -> dict[str, float]:
    return {kind: float(values[0]) for kind, values in rouge([prediction], [reference]).items()}


# --------------------------------------------------------------------------------------------------------------------
# ROUGE
# --------------------------------------------------------------------------------------------------------------------


def test_rouge_by_hand():
    # Reference: the cats sat / on the mat. Prediction: on the mat / the cat sat. Stemmed: cats is cat.
    scores = one_rouge("On the mat.\nThe cat sat.", "The cats sat.\nOn the mat.")
    assert scores["rouge1"] == 1.0
    assert scores["rouge2"] == pytest.approx(2 * (4 / 5 * 4 / 5) / (4 / 5 + 4 / 5))  # all but one of five pairs
    assert scores["rougeL"] == pytest.approx(0.5)  # "the cat sat", 3 of 6
    assert scores["rougeLsum"] == 1.0  # each sentence is found whole


def test_rouge_is_an_f_measure():
    scores = one_rouge("a b", "a b c d e f g h")
    assert scores["rouge1"] == pytest.approx(2 * 1.0 * 0.25 / 1.25)
    assert scores["rouge2"] == pytest.approx(2 * 1.0 * (1 / 7) / (1 + 1 / 7))


def test_rouge_is_what_its_library_says():
    direct = RougeScorer(list(KINDS), use_stemmer=True)
    parts = [" ".join(DOCUMENT.split()[start : start + 60]) for start in range(0, 1200, 60)]
    predictions, references = parts[:10], parts[10:]
    found = rouge(predictions, references)
    for place, (prediction, reference) in enumerate(zip(predictions, references, strict=True)):
        split = direct.score("\n".join(sentences(reference)), "\n".join(sentences(prediction)))
        plain = direct.score(reference, prediction)
        for kind in KINDS:
            assert found[kind][place] == split[kind].fmeasure
        for kind in KINDS[:3]:
            assert found[kind][place] == plain[kind].fmeasure


def test_lsum_is_not_l_where_sentences_stand_in_one_line():
    prediction = "The model keeps a few tokens. It forgets the others. Training is quick."
    reference = "Training is quick. The model keeps a few tokens. It forgets the others."
    scores = one_rouge(prediction, reference)
    assert scores["rougeLsum"] == 1.0
    assert scores["rougeL"] < 0.8
    assert scores["rougeLsum"] > RougeScorer(["rougeLsum"]).score(reference, prediction)["rougeLsum"].fmeasure


def test_lines_are_sentences_where_there_are_several():
    assert by_lines("One. Two.\n\nthree") == "One. Two.\nthree"
    assert by_lines("One is here. Two is there.\n") == "One is here.\nTwo is there."
    assert by_lines("") == ""


def test_nothing_scores_nothing():
    assert set(one_rouge("", "a reference").values()) == {0.0}
    assert set(one_rouge("a prediction", " \n").values()) == {0.0}
    assert {kind: values.shape for kind, values in rouge([], []).items()} == dict.fromkeys(KINDS, (0,))
    with pytest.raises(ValueError, match="must be as many, got 1 and 2"):
        rouge(["a"], ["a", "b"])


def test_processes_change_no_score(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyramidion.evaluation.overlap.WORTH_A_PROCESS", 4)
    predictions, references = ([make_text(seed + start, 20) for seed in range(5)] for start in (0, 50))
    told: list[tuple[int, int, str]] = []
    several = rouge(predictions, references, workers=2, tell=lambda *said: told.append(said))
    for kind, values in rouge(predictions, references).items():
        assert (several[kind] == values).all()
    assert told == [(place, 5, "scoring") for place in range(1, 6)]


@pytest.mark.slow
def test_scoring_takes_less_than_a_tenth_of_a_second_each():
    words = DOCUMENT.split()
    parts = [" ".join((words * 2)[start : start + 170]) for start in range(101)]
    begun = time.monotonic()
    rouge(parts[:-1], parts[1:], workers=2)
    assert time.monotonic() - begun < 10


# --------------------------------------------------------------------------------------------------------------------
# Scripts
# --------------------------------------------------------------------------------------------------------------------


def test_unseen_letters_are_counted():
    assert unseen("Plain, 100 %!") == 0.0
    assert unseen("") == 0.0
    assert unseen("长文档的摘要") == 1.0
    assert unseen("abc é") == 0.25
    assert unseen("ABC") == 0.0


@pytest.mark.parametrize(
    ("text", "script"), [("长文档的摘要", "CJK"), ("ملخص المستند", "ARABIC"), ("Краткое изложение", "CYRILLIC")]
)
def test_a_script_that_rouge_cannot_see_is_warned_of(text: str, script: str):
    warning = script_warning(["plain text", text])
    assert warning is not None
    assert "1 of 2 texts" in warning
    assert script in warning
    assert one_rouge(text, text)["rouge1"] == 0.0


def test_accents_and_english_are_not_warned_of():
    assert script_warning(["Un café à la crème est servi dans la petite salle", "plain", ""]) is None


# --------------------------------------------------------------------------------------------------------------------
# Sentences
# --------------------------------------------------------------------------------------------------------------------


def test_sentences_mind_abbreviations():
    text = "Dr. Smith saw Fig. 3, i.e. the plot by Jones et al. in 2009. It was 3.5 cm wide! Was it? Yes."
    assert sentences(text) == [
        "Dr. Smith saw Fig. 3, i.e. the plot by Jones et al. in 2009.",
        "It was 3.5 cm wide!",
        "Was it?",
        "Yes.",
    ]


def test_the_plain_rule():
    text = 'J. Smith et al. (2009) saw Fig. 3. It was 3.5 cm wide! "Was it?" (Yes.) End\nnew . tokens . 句子。句子'
    assert [one.strip() for one in by_rule(text)] == [
        "J. Smith et al. (2009) saw Fig. 3.",
        "It was 3.5 cm wide!",
        '"Was it?"',
        "(Yes.)",
        "End",
        "new .",
        "tokens .",
        "句子。",
        "句子",
    ]


@pytest.mark.parametrize("text", ["", " ", "\0", "((((", '"1.)))&(\n e.g.)∯ |^😀', "1. 2. 3. ii. a)", "∯ȸ∮☏.&ᓴ. A b."])
def test_nothing_is_lost_between_sentences(text: str):
    assert " ".join(sentences(text)).split() == text.split()


def test_long_texts_take_the_rule_and_agree_with_pysbd():
    assert len(DOCUMENT) > LONG
    pieces = [part for part in DOCUMENT.split("\n\n") if part.strip()]
    short = [sentence for piece in pieces for sentence in sentences(piece)]
    long = sentences(DOCUMENT)
    assert len(set(short) & set(long)) > 0.9 * max(len(short), len(long))


# --------------------------------------------------------------------------------------------------------------------
# Resampling
# --------------------------------------------------------------------------------------------------------------------


def test_intervals_cover_as_often_as_they_say():
    random = np.random.default_rng(1)
    covered = 0
    for trial in range(300):
        low, high = bootstrap(random.gamma(2.0, 0.1, size=100), seed=trial, n=200)
        covered += low <= 0.2 <= high
    assert 0.89 <= covered / 300 <= 0.98


def test_intervals_are_those_of_theory_and_deterministic():
    values = np.random.default_rng(0).normal(0.4, 0.1, size=400)
    low, high = bootstrap(values)
    assert (low, high) == bootstrap(values) != bootstrap(values, seed=1)
    wide = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - wide, abs=wide / 8)
    assert high == pytest.approx(values.mean() + wide, abs=wide / 8)
    assert bootstrap(np.array([0.5])) == (0.5, 0.5)


def test_a_real_difference_is_found_where_means_alone_would_hide_it():
    random = np.random.default_rng(0)
    hard = random.uniform(0.1, 0.7, size=200)  # documents differ far more than systems
    a, b = hard + 0.01 + random.normal(0, 0.02, 200), hard + random.normal(0, 0.02, 200)
    found = paired_bootstrap(a, b)
    assert found.difference == pytest.approx((a - b).mean())
    assert 0 < found.low < found.difference < found.high
    assert found.p < 0.01
    assert bootstrap(a)[0] < bootstrap(b)[1], "the intervals of the means overlap"
    reverse = paired_bootstrap(b, a)
    assert (reverse.difference, reverse.high) == (-found.difference, pytest.approx(-found.low, abs=1e-3))
    assert reverse.p == found.p


def test_no_difference_is_seldom_found():
    random = np.random.default_rng(2)
    p = [paired_bootstrap(*random.normal(0.4, 0.1, (2, 80)), seed=trial, n=200).p for trial in range(200)]
    assert 0.01 <= np.mean(np.array(p) < 0.05) <= 0.10
    same = random.normal(size=30)
    assert paired_bootstrap(same, same) == (0.0, 0.0, 0.0, 1.0)


def test_what_cannot_be_resampled_is_refused():
    for wrong in ([], [math.nan, 1.0], [[1.0]]):
        with pytest.raises(ValueError, match="`values` must be finite numbers"):
            bootstrap(np.array(wrong))
    with pytest.raises(ValueError, match="got 2 and 3 values"):
        paired_bootstrap(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="`n` must be at least 1"):
        bootstrap(np.zeros(2), n=0)


# --------------------------------------------------------------------------------------------------------------------
# Wording and baselines
# --------------------------------------------------------------------------------------------------------------------


def test_repetition_by_hand():
    found = repetition("A b c d e, a B c d f.", "x a b c d x b c d f x")
    # 4-grams: abcd bcde cdea deab eabc abcd bcdf: 7, of which abcd stands twice; in the source abcd and, no, bcdf
    assert found.repeated == pytest.approx(1 / 7)
    assert found.copied == pytest.approx(2 / 6)
    assert found.distinct == pytest.approx(6 / 10)
    assert repetition("one two three") == (None, None, 1.0)
    assert repetition("", "source") == (None, None, None)
    assert repetition("a a a a a a", "b").repeated == pytest.approx(2 / 3)
    assert repetition("a b c d", "z").copied == 0.0


def test_lead_takes_the_first_words():
    assert lead(" one\n two\tthree four", 3) == "one two three"
    assert len(lead(DOCUMENT).split()) == 170
    assert lead("") == ""


def dense_centrality(found: list[str]) -> np.ndarray:
    """Compute LexRank as the paper writes it: the whole matrix, and its eigenvector."""
    words = [["".join(c for c in word if c.isalnum()) for word in text.lower().split()] for text in found]
    vocabulary = sorted({word for text in words for word in text})
    counts = np.array([[Counter(text)[word] for word in vocabulary] for text in words], dtype=float)
    vectors = counts * np.log(len(found) / (counts > 0).sum(0))
    norms = np.linalg.norm(vectors, axis=1)
    n = len(found)
    similar = np.array(
        [
            [vectors[i] @ vectors[j] / (norms[i] * norms[j]) if norms[i] * norms[j] else 0.0 for j in range(n)]
            for i in range(n)
        ]
    )
    rows = np.array([row / row.sum() if row.sum() else np.full(n, 1 / n) for row in similar])
    walk = 0.15 / n + 0.85 * rows
    values, directions = np.linalg.eig(walk.T)
    first = np.abs(np.real(directions[:, np.argmax(np.real(values))]))
    return first / first.sum()


SENTENCES = [
    "pooling keeps the tokens that the task needs",
    "the tokens that the task needs are few",
    "the weather was fine on the day",
    "pooling is trained with the task",
    "the",  # in every sentence: it has no weight
    "the tokens are kept by pooling the tokens",
    "unlike anything else the zebra",
]


def test_lexrank_is_the_dense_one():
    np.testing.assert_allclose(centrality(SENTENCES), dense_centrality(SENTENCES), rtol=1e-6)
    more = [make_text(seed, 5 + seed % 7).replace(".", "").replace(",", "") for seed in range(40)]
    np.testing.assert_allclose(centrality(more), dense_centrality(more), rtol=1e-6)
    assert centrality(more).sum() == pytest.approx(1)


@pytest.mark.parametrize("found", [SENTENCES, SENTENCES[::-1]])
def test_lexrank_takes_central_sentences_in_order_and_to_the_word(found: list[str]):
    text = ". ".join(one.capitalize() for one in found) + "."
    chosen: dict[int, list[str]] = {}
    for place in np.argsort(-dense_centrality(found), kind="stable"):
        left = 14 - sum(map(len, chosen.values()))
        chosen[place] = (found[place].capitalize() + ".").split()[:left]
    expected = [" ".join(chosen[place]) for place in sorted(chosen) if chosen[place]]
    assert 1 < len(expected) < len(found)
    assert lexrank(text, 14).splitlines() == expected


def test_lexrank_takes_whatever_comes():
    assert lexrank("") == ""
    assert lexrank("\0 \n") == "\0"
    assert lexrank("one sentence only") == "one sentence only"
    assert lexrank("same here. " * 30, 5).split() == ["same", "here.", "same", "here.", "same"]
    assert len(lexrank(DOCUMENT).split()) == 170


def test_lexrank_of_a_book_is_quick():
    book = " ".join(DOCUMENT.split()) * 60  # 100,000 words in a line
    begun = time.process_time()
    lexrank(book)
    assert time.process_time() - begun < 10


# --------------------------------------------------------------------------------------------------------------------
# A store to evaluate on
# --------------------------------------------------------------------------------------------------------------------


class FakeSplit:
    """Hold documents as a token store's split does."""

    def __init__(self, rows: list[dict[str, str]], tokenizer: Any) -> None:
        self.rows, self.tokenizer = rows, tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        tokens = self.tokenizer(self.rows[index]["document"], add_special_tokens=False)["input_ids"]
        return SimpleNamespace(document=np.array(tokens, dtype=np.int64), id=self.rows[index]["id"])

    def document_text(self, index: int) -> str:
        return self.rows[index]["document"]

    def summary_text(self, index: int) -> str:
        return self.rows[index]["summary"]


class FakeStore:
    """Read a file of rows as a token store."""

    def __init__(self, path: Path) -> None:
        self.rows = json.loads(path.read_text())
        self.splits = ["val"]
        self.fingerprint = f"hash of {len(self.rows)} rows {self.rows[0]['id']}"

    @classmethod
    def open(cls, path: Path) -> FakeStore:
        if not path.is_file():
            raise ValueError(f"`--data` must be a store, got {str(path)!r}.")
        return cls(path)

    def __contains__(self, split: str) -> bool:
        return split in self.splits

    def __getitem__(self, split: str) -> FakeSplit:
        return FakeSplit(self.rows, make_tokenizer())

    def tokenizer(self) -> Any:
        return make_tokenizer()


DOCUMENTS = 23


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"id": f"doc-{seed}", "document": make_text(seed, 20 + 37 * seed % 90), "summary": make_text(seed + 99, 12)}
        for seed in range(DOCUMENTS)
    ]
    path = tmp_path_factory.mktemp("store") / "store.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture(autouse=True)
def _fake_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyramidion.data, "TokenStore", FakeStore)


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(main, ["evaluate", *map(str, arguments)])


def evaluate(model: Path, store: Path, output: Path, *arguments: Any) -> Any:
    shared = ("--model", model, "--data", store, "--output", output, "--batch-size", 2)
    return call(*shared, *arguments)


@pytest.fixture(scope="module")
def whole(model: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run an evaluation that nothing interrupts."""
    output = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyramidion.data, "TokenStore", FakeStore)
        done = evaluate(model, store, output, "--baselines", "lead,lexrank")
    assert done.exit_code == 0, done.output
    (output.parent / "stdout").write_text(done.stdout)
    return output


# --------------------------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------------------------


def test_predictions_are_the_models_own(whole: Path, model: Path, store: Path):
    rows, source = read_rows(whole / "predictions.jsonl"), json.loads(store.read_text())
    written = Summarizer.from_pretrained(model)([row["document"] for row in source], batch_size=2)
    assert [row["prediction"] for row in rows] == [one.text for one in written]
    assert [row["document_tokens"] for row in rows] == [one.document_tokens for one in written]
    assert [(row["index"], row["id"], row["reference"]) for row in rows] == [
        (place, row["id"], row["summary"]) for place, row in enumerate(source)
    ]


def test_scores_are_those_of_the_predictions(whole: Path):
    scores = json.loads((whole / "scores.json").read_text())
    rows = read_rows(whole / "predictions.jsonl")
    references = [row["reference"] for row in rows]
    for name, file in (("model", "predictions"), ("lead", "lead"), ("lexrank", "lexrank")):
        texts = [row["prediction"] for row in read_rows(whole / f"{file}.jsonl")]
        assert len(texts) == DOCUMENTS
        for kind, values in rouge(texts, references).items():
            told = scores["rouge"][name][kind]
            assert told["mean"] == pytest.approx(100 * values.mean())
            assert [told["low"], told["high"]] == pytest.approx([100 * side for side in bootstrap(values)])
    assert scores["rouge"]["lead"]["rouge1"]["mean"] > scores["rouge"]["model"]["rouge1"]["mean"]
    assert scores["differences"]["lead"]["rouge1"]["difference"] == pytest.approx(
        scores["rouge"]["model"]["rouge1"]["mean"] - scores["rouge"]["lead"]["rouge1"]["mean"]
    )
    assert scores["wording"]["lead"]["copied"] == 1.0
    assert scores["wording"]["reference"]["words"] == pytest.approx(12, abs=1)
    assert scores["settings"]["decoding"]["num_beams"] == 2
    warning = script_warning([*references, *(row["prediction"] for row in rows)])  # an untrained model writes anything
    assert (scores["documents"], scores["failed"]) == (DOCUMENTS, 0)
    assert scores["warnings"] == ([warning] if warning else [])


def test_the_table_says_all(whole: Path):
    table = (whole / "scores.md").read_text()
    assert table in (whole.parent / "stdout").read_text()
    scores = json.loads((whole / "scores.json").read_text())
    for part in ("ROUGE-Lsum", "| lexrank", "pysbd", "Porter stemmer", "decoding.max_new_tokens: 9", "95 %, bootstrap"):
        assert part in table
    first = scores["rouge"]["model"]["rouge1"]
    assert f"{first['mean']:.2f} ({first['low']:.2f} to {first['high']:.2f})" in table


@pytest.mark.parametrize("lines", [0, 1, 9, DOCUMENTS - 1, DOCUMENTS])
def test_a_run_goes_on_where_it_ended(whole: Path, model: Path, store: Path, tmp_path: Path, lines: int):
    kept = (whole / "predictions.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "settings.json").write_bytes((whole / "settings.json").read_bytes())
    torn = kept[lines][:17] if lines < DOCUMENTS else b""
    (tmp_path / "predictions.jsonl").write_bytes(b"".join(kept[:lines]) + torn)
    (tmp_path / "lead.jsonl").write_bytes((whole / "lead.jsonl").read_bytes()[:100])
    assert evaluate(model, store, tmp_path, "--baselines", "lead,lexrank").exit_code == 0
    for name in ("predictions.jsonl", "lead.jsonl", "lexrank.jsonl", "scores.json", "scores.md"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_finished_run_needs_no_model(whole: Path, model: Path, store: Path, monkeypatch: pytest.MonkeyPatch):
    def never(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Summarizer, "from_pretrained", never)
    assert evaluate(model, store, whole, "--baselines", "lead,lexrank").exit_code == 0


def test_killed_and_started_again_is_as_never_killed(whole: Path, model: Path, store: Path, tmp_path: Path):
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import pyramidion.data; "
        "import test_evaluation as t; pyramidion.data.TokenStore = t.FakeStore; from pyramidion.cli import main; main()"
    )
    shared = ["evaluate", "--model", model, "--data", store, "--output", tmp_path / "run", "--batch-size", 2]
    arguments = [sys.executable, "-c", script, *map(str, shared), "--baselines", "lead,lexrank"]
    running = subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert 1 <= kill_when(running, tmp_path / "run" / "predictions.jsonl", 1) < DOCUMENTS
    assert evaluate(model, store, tmp_path / "run", "--baselines", "lead,lexrank").exit_code == 0
    for name in ("predictions.jsonl", "scores.json"):
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-beams", 3], "decoding.num_beams was 2, is 3"),
        (["--limit", 5], f"documents was {DOCUMENTS}, is 5"),
        (["--max-length", 40], "max_length was None, is 40"),
        (["--batch-size", 3], "batch_size was 2, is 3"),
    ],
)
def test_other_settings_are_refused_by_name(whole: Path, model: Path, store: Path, arguments: list[Any], said: str):
    before = (whole / "predictions.jsonl").read_bytes()
    done = evaluate(model, store, whole, *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert (whole / "predictions.jsonl").read_bytes() == before


def test_another_model_or_store_is_refused(whole: Path, store: Path, tmp_path: Path):
    other = write_model(tmp_path / "other", decoder_layers=1)
    done = evaluate(other, store, whole)
    assert (done.exit_code, "other settings: model was " in done.stderr) == (2, True)
    rows = json.loads(store.read_text())
    changed = tmp_path / "store.json"
    changed.write_text(json.dumps([{**rows[0], "id": "else"}, *rows[1:]]))
    settings = json.loads((whole / "settings.json").read_text())["settings"]
    model = Path(json.loads((whole / "settings.json").read_text())["about"]["model"])
    assert settings["model"] == fingerprint(model) != fingerprint(other)
    done = evaluate(model, changed, whole)
    assert (done.exit_code, "data was" in done.stderr) == (2, True)


def test_a_model_that_was_trained_on_is_another(model: Path, tmp_path: Path):
    copied = Path(shutil.copytree(model, tmp_path / "copy"))
    assert fingerprint(copied) == fingerprint(model)
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json"):
        before = (copied / name).read_bytes()
        (copied / name).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        assert fingerprint(copied) != fingerprint(model), name
        (copied / name).write_bytes(before)


def test_lines_that_are_not_the_runs_are_refused(whole: Path, model: Path, store: Path, tmp_path: Path):
    (tmp_path / "predictions.jsonl").write_text("{}\n")
    done = evaluate(model, store, tmp_path)
    assert (done.exit_code, "predictions without settings.json" in done.stderr) == (2, True)
    (tmp_path / "settings.json").write_bytes((whole / "settings.json").read_bytes())
    done = evaluate(model, store, tmp_path)
    assert (done.exit_code, "must hold document 0 in line 1" in done.stderr) == (2, True)


def test_a_tokenizer_that_is_not_the_stores_reads_the_texts(
    model: Path, store: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeStore, "tokenizer", lambda self: SimpleNamespace(get_vocab=dict))
    monkeypatch.setattr(FakeSplit, "__getitem__", lambda self, i: SimpleNamespace(id=self.rows[i]["id"]))
    assert evaluate(model, store, tmp_path).exit_code == 0
    assert (tmp_path / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()


def test_failures_count_as_empty(model: Path, tmp_path: Path):
    texts = ["", make_text(1, 20), make_text(2, 700)]
    rows = [{"id": str(i), "document": text, "summary": "a b"} for i, text in enumerate(texts)]
    (tmp_path / "store.json").write_text(json.dumps(rows))
    done = evaluate(model, tmp_path / "store.json", tmp_path / "run")
    assert done.exit_code == 0
    assert "1 documents failed" in done.stdout
    assert "1 documents have a note; the first: " in done.stdout
    assert "more than the 512 the model is for" in done.stdout
    assert json.loads((tmp_path / "run" / "scores.json").read_text())["failed"] == 1


# --------------------------------------------------------------------------------------------------------------------
# Files and comparisons
# --------------------------------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_is_scored_and_compared(tmp_path: Path):
    references = [make_text(seed, 30) for seed in range(40)]
    good = [{"id": i, "prediction": text[:120], "reference": text} for i, text in enumerate(references)]
    poor = [{**row, "prediction": row["prediction"][:60]} for row in reversed(good)]
    first, second = write_rows(tmp_path / "good.jsonl", good), write_rows(tmp_path / "poor.jsonl", poor)
    done = call("--predictions", first, "--compare", second, "--json")
    assert done.exit_code == 0
    scores = json.loads(done.stdout)
    assert list(scores["rouge"]) == ["good"]
    found = scores["differences"][str(second)]
    direct = rouge([row["prediction"] for row in good], references)["rouge1"]
    other = rouge([row["prediction"] for row in reversed(poor)], references)["rouge1"]
    assert found["rouge1"]["difference"] == pytest.approx(100 * (direct - other).mean())
    assert found["rouge1"]["low"] > 0
    assert found["rouge1"]["p"] < 0.01
    assert scores["wording"]["good"]["copied"] is None
    done = call("--predictions", first)
    assert "| other" in call("--predictions", first, "--compare", second).stdout
    assert "| other" not in done.stdout


def test_a_run_is_compared_with_itself(whole: Path):
    done = call("--predictions", whole, "--compare", whole, "--json")
    found = json.loads(done.stdout)["differences"][str(whole)]
    assert found["rouge1"] == {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    assert found["documents"] == DOCUMENTS


def test_baselines_of_a_file_need_documents(tmp_path: Path, whole: Path, store: Path):
    rows = [{"id": 1, "prediction": "a b c", "reference": "a b d", "document": "a b d. e f g."}]
    done = call("--predictions", write_rows(tmp_path / "with.jsonl", rows), "--baselines", "lead", "--json")
    assert json.loads(done.stdout)["rouge"]["lead"]["rouge1"]["mean"] == pytest.approx(100 * 2 * 0.5 / 1.5)
    del rows[0]["document"]
    bare = write_rows(tmp_path / "without.jsonl", rows)
    done = call("--predictions", bare, "--baselines", "lead")
    assert (done.exit_code, "`--baselines` must have documents" in done.stderr) == (2, True)
    done = call("--predictions", bare, "--baselines", "lead", "--data", store)
    assert (done.exit_code, "must be 'doc-0'" in done.stderr) == (2, True)
    done = call("--predictions", whole, "--baselines", "lead", "--data", store, "--json")
    told = json.loads((whole / "scores.json").read_text())
    assert json.loads(done.stdout)["rouge"]["lead"] == told["rouge"]["lead"]


def test_pairs_are_the_same_documents():
    def row(name: Any, reference: str = "r", **others: Any) -> dict[str, Any]:
        return {"id": name, "reference": reference, **others}

    assert pair([row("a"), row("b"), row("c")], [row("c"), row("x"), row("a")]) == [(0, 2), (2, 0)]
    assert pair([row("a"), row("a")], [row("a"), row("a")]) == [(0, 0), (1, 1)]
    assert pair([row(None, index=4)], [row(None, index=3), row(None, index=4)]) == [(0, 1)]
    with pytest.raises(ValueError, match="none in common"):
        pair([row("a")], [row("b")])
    with pytest.raises(ValueError, match="same references, got another for document 'b'"):
        pair([row("a"), row("b")], [row("a"), row("b", "else")])
    assert pair([row("a", "one  two\n")], [row("a", "one two")]) == [(0, 0)]


def test_a_script_is_warned_of_in_the_command(tmp_path: Path):
    rows = [{"id": i, "prediction": "长文档的摘要", "reference": "长文档的摘要"} for i in range(3)]
    done = call("--predictions", write_rows(tmp_path / "rows.jsonl", rows), "--output", tmp_path / "out")
    assert done.exit_code == 0
    assert "a-z and 0-9 only: 6 of 6 texts" in done.stderr
    assert "Warning: " in (tmp_path / "out" / "scores.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Exactly one of `--model` and `--predictions` must be given, got neither"),
        (["--model", "m", "--predictions", "p"], "got both"),
        (["--model", "m"], "`--data` must name a token store"),
        (["--predictions", "missing.jsonl"], "must be a run's folder or a file of predictions"),
        (["--predictions", "{rows}", "--baselines", "oracle"], "must be of lead, lexrank, got 'oracle'"),
        (["--predictions", "{rows}", "--compare", "missing"], "`missing` must be a run's folder"),
        (["--predictions", "{rows}", "--limit", "0"], "`--limit` must be at least 1, got 0"),
        (["--predictions", "{bare}"], "must have a text as `reference` in each line, got none in line 1"),
        (["--predictions", "{rows}", "--dtype", "int8"], "`--dtype` must be"),
        (["--model", "m", "--data", "missing"], "got 'missing'"),
        (["--model", "m", "--data", "{store}"], "config.json"),
        (["--model", "{model}", "--data", "{store}", "--split", "dev"], "`--split` must be one of val, got 'dev'"),
        (["--model", "{model}", "--data", "{store}", "--device", "tpu"], "`device` must be"),
        (["--model", "{model}", "--data", "{store}", "--num-beams", "0"], "`num_beams` must be"),
    ],
)
def test_wrong_calls_end_with_2(model: Path, store: Path, tmp_path: Path, arguments: list[str], said: str):
    rows = write_rows(tmp_path / "rows.jsonl", [{"id": 1, "prediction": "a", "reference": "a"}])
    bare = write_rows(tmp_path / "bare.jsonl", [{"id": 1, "prediction": "a"}])
    places = {"rows": rows, "bare": bare, "model": model, "store": store}
    done = call(*(argument.format(**places) for argument in arguments))
    assert done.exit_code == 2
    assert said in done.stderr
    assert not os.path.exists(model / "evaluation-val")


def test_a_torn_line_of_a_file_is_left_out(tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prediction": "a", "reference": "a"}] * 2)
    path.write_bytes(path.read_bytes()[:-5])
    assert len(read_predictions(path)) == 1
