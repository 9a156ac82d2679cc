"""Pretraining: what is taken out of a document can be put back, fits, lies everywhere, and depends on nothing else."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pyramidion.bench import torture
from pyramidion.data import Collator, Example, Exercises, LengthGroupedBatches, TokenStore, objectives
from pyramidion.data.objectives import (
    CHOICES,
    Corruption,
    GapSentences,
    SentenceMarks,
    Spans,
    Summaries,
    find_masks,
    importance,
    make_objective,
)
from pyramidion.data.tokenizer import train_tokenizer
from pyramidion.training.trainer import EpochBatches, EpochLoader

ROOT = Path(__file__).resolve().parents[1]
ESSAY = (ROOT / "src" / "pyramidion" / "assets" / "document.txt").read_text()
MASK, EOS = 3, 2
MASKS = (3, 5, 6, 4)
FIRST = 10  # ids below are special


def document(tokens: Sequence[int] | np.ndarray) -> Example:
    return Example(np.array(tokens, dtype=np.int64), np.array([4, 5], dtype=np.int64), "name")


def dice(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def put_back(source: Sequence[int], target: Sequence[int], masks: Sequence[int] = MASKS) -> list[int]:
    """Put spans back where they were, one token after the other: the masks must take turns, alike in both."""
    pieces: dict[int, list[int]] = {0: []}
    for token in target:
        if token in masks:
            assert token == masks[len(pieces) % len(masks)]
            pieces[len(pieces)] = []
        else:
            pieces[len(pieces) - 1].append(token)
    whole: list[int] = []
    count = 0
    for token in source:
        if token in masks:
            assert token == masks[count % len(masks)]
            whole += pieces[count]
            count += 1
        else:
            whole.append(token)
    assert count == len(pieces)
    return whole


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([ESSAY], 700)


@pytest.fixture(scope="module")
def bytes_only() -> PreTrainedTokenizerFast:
    """Give a tokenizer without merges: every byte is a token."""
    return train_tokenizer([], 260)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return TokenStore.open(torture.make_store(tmp_path_factory.mktemp("corpus") / "store"))


# --------------------------------------------------------------------------------------------------------------------
# Spans
# --------------------------------------------------------------------------------------------------------------------

sizes = st.integers(0, 4) | st.integers(0, 300)


@settings(deadline=None, max_examples=400)
@given(
    n=sizes,
    max_source=st.integers(2, 200),
    max_target=st.integers(2, 60),
    length=st.floats(1, 12),
    density=st.floats(0.001, 0.999),
    names=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
@example(n=0, max_source=2, max_target=2, length=3.0, density=0.15, names=1, seed=0)
@example(n=1, max_source=2, max_target=2, length=3.0, density=0.15, names=1, seed=0)
@example(n=2, max_source=9, max_target=9, length=1.0, density=0.999, names=1, seed=0)
@example(n=3, max_source=9, max_target=9, length=1.0, density=0.5, names=1, seed=0)
@example(n=300, max_source=200, max_target=2, length=12.0, density=0.999, names=1, seed=0)
def test_spans_can_be_put_back(
    n: int, max_source: int, max_target: int, length: float, density: float, names: int, seed: int
):
    tokens = dice(seed, n).integers(FIRST, FIRST + 5, n)  # few kinds, so that a shift could go unnoticed nowhere
    masks = MASKS[:names]
    spans = Spans(masks, max_source, max_target, Corruption(span_length=length, span_density=density))
    made = spans(document(tokens), dice(seed))
    source, target = made.document.tolist(), made.summary.tolist()
    whole, part = tokens.tolist(), put_back(source, target, masks)
    assert len(part) == min(n, max_source - 1)
    assert any(whole[start : start + len(part)] == part for start in range(n - len(part) + 1))
    assert 1 <= len(source) <= max_source - 1
    assert len(target) <= max_target - 1
    assert bool(target) == bool(n)
    assert not any({one, other} <= set(masks) for one, other in pairwise(source))  # spans do not touch
    if min(n, max_source - 1) > 1:
        assert set(source) - set(masks)  # something is left to read
    assert made.id == "name"
    batch = Collator(eos=EOS, max_source=max_source, max_target=max_target)([made])
    assert batch["input_ids"].tolist() == [[*source, EOS]]  # nothing is cut again
    assert batch["labels"].tolist() == [[*target, EOS]]


@pytest.mark.parametrize("max_target", [2, 3, 4, 7, 10, 21])
@pytest.mark.parametrize("length", [1.0, 1.5, 3.0, 8.0])
def test_as_much_is_taken_out_as_asked_for_or_as_fits(length: float, max_target: int):
    for density in (0.01, 0.15, 0.5, 0.97):
        spans = Spans((MASK,), 100, max_target, Corruption(span_length=length, span_density=density))
        for n in range(1, 99):
            asked = min(max(1, round(density * n)), max(1, n - 1))
            pieces = max(1, round(asked / length))
            masked, count = spans.amount(n)
            assert 1 <= count <= masked
            assert count - 1 <= n - masked  # one token between any two
            if asked + pieces <= max_target:
                assert masked == asked
                assert count == min(pieces, n - masked + 1)
            else:  # the target is full, but for spans that would touch or be empty
                assert masked <= asked
                assert masked + count <= max_target
                assert masked + count == max_target or masked == asked or count in (masked, n - masked + 1)


@pytest.mark.parametrize(("length", "density"), [(3.0, 0.15), (1.0, 0.3), (5.5, 0.05), (2.0, 0.5)])
def test_spans_have_the_density_and_the_mean_length_asked_for(length: float, density: float):
    n, draws = 2003, 50
    spans = Spans((MASK,), 9000, 9000, Corruption(span_length=length, span_density=density))
    masked, found = 0, []
    for seed in range(draws):
        target = spans(document(np.arange(FIRST, FIRST + n)), dice(seed)).summary
        kept = np.split(target, np.flatnonzero(target == MASK))
        found += [int((piece != MASK).sum()) for piece in kept]
        masked += int((target != MASK).sum())
    assert masked / draws / n == pytest.approx(density, rel=0.01)
    assert np.mean(found) == pytest.approx(length, rel=0.03)
    if length > 1:  # lengths vary as a geometric law's do
        assert np.std(found) == pytest.approx(np.sqrt(length * (length - 1)), rel=0.1)
        assert min(found) == 1


def test_spans_lie_all_over_the_document():
    """Every place is missing as often as every other, but for a span's length at either edge, where fewer reach."""
    n, draws = 97, 6_000
    spans = Spans((MASK,), 200, 100, Corruption())
    missing = np.zeros(n)
    for seed in range(draws):
        target = spans(document(np.arange(FIRST, FIRST + n)), dice(seed)).summary
        missing[target[target != MASK] - FIRST] += 1
    expected = spans.amount(n)[0] / n
    deviation = np.sqrt(draws * expected * (1 - expected))
    inner = missing[5:-5]
    assert np.abs(inner - inner.mean()).max() < 5 * deviation
    assert missing.min() > 0.3 * missing.mean()
    assert missing.max() < 1.2 * missing.mean()


def test_a_long_document_loses_what_the_target_can_hold():
    spans = Spans((MASK,))
    assert spans.amount(8191) == (384, 128)
    made = spans(document(np.arange(FIRST, FIRST + 20_000)), dice(1))
    assert len(made.summary) == 511
    assert len(made.document) == 8191 - 384 + 128
    places = made.summary[made.summary != MASK] - made.document[0]
    counts, _ = np.histogram(places, bins=8, range=(0, 8191))
    assert counts.min() > 20  # of 48
    assert Spans((MASK,), max_target=4096).amount(8191) == (1229, 410)
    assert "384 tokens in 128 spans that are missing from 8191" in str(spans)


def test_a_long_document_is_read_from_anywhere():
    """Every beginning is as likely, the first and the last one too; no part is shorter than what can be read."""
    spans, draws = Spans((MASK,), 11, 5), 4_000
    parts = [spans(document(np.arange(FIRST, FIRST + 17)), dice(seed)) for seed in range(draws)]
    starts = Counter(put_back(part.document.tolist(), part.summary.tolist(), (MASK,))[0] - FIRST for part in parts)
    assert set(starts) == set(range(17 - 10 + 1))
    assert min(starts.values()) > 0.8 * draws / 8


def test_an_unknown_sign_is_not_taken_for_a_span():
    tokens = [MASK, 11, 12, MASK, MASKS[2], 13, 14, 15, MASK]
    made = Spans(MASKS, 9, 9)(document(tokens), dice(0))
    assert put_back(made.document.tolist(), made.summary.tolist()) == [11, 12, 13, 14, 15]
    nothing = Spans((MASK,), 6, 9)(document([MASK, MASK]), dice(0))
    assert (nothing.document.tolist(), nothing.summary.tolist()) == ([MASK], [])


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"span_length": 0.9}, "`span_length` must be at least 1, got 0.9."),
        ({"span_length": float("nan")}, "`span_length` must be at least 1, got nan."),
        ({"span_density": -0.1}, "`span_density` must be above 0 and below 1, got -0.1."),
        ({"span_density": 1.0}, "`span_density` must be above 0 and below 1, got 1.0."),
        ({"gap_density": 0.0}, "`gap_density` must be above 0 and below 1, got 0.0."),
        ({"gap_choice": "best"}, "`gap_choice` must be one of principal, lead, random, got 'best'."),
    ],
)
def test_wrong_settings_are_refused(given_: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:
        Corruption(**given_)
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["max_source", "max_target"])
def test_there_must_be_room_to_take_something_out(name: str):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 2 to take something out, got 1."):
        Spans((MASK,), **{name: 1})


# --------------------------------------------------------------------------------------------------------------------
# Gap sentences
# --------------------------------------------------------------------------------------------------------------------

STOPS = SentenceMarks(np.array([0] * FIRST + [objectives.BREAK.bit] + [0] * 500, dtype=np.uint8))  # one id ends all
STOP = FIRST


def sentence_ids(seed: int, count: int, longest: int = 12, kinds: int = 40) -> list[list[int]]:
    random = dice(seed, count)
    return [
        [*random.integers(STOP + 1, STOP + 1 + kinds, random.integers(0, longest)).tolist(), STOP] for _ in range(count)
    ]


def rouge1(one: Sequence[int], other: Sequence[int]) -> float:
    """Compute ROUGE-1 F1 as it is defined."""
    overlap = (Counter(one) & Counter(other)).total()
    if not overlap:
        return 0.0
    precision, recall = overlap / len(one), overlap / len(other)
    return 2 * precision * recall / (precision + recall)


def plain_importance(sentences: list[list[int]]) -> list[float]:
    return [
        rouge1(one, [token for j, other in enumerate(sentences) if j != i for token in other])
        for i, one in enumerate(sentences)
    ]


def plain_pool(sentences: list[list[int]], room: float) -> list[int]:
    """List the best sentences until they are longer together than there is room."""
    scores = plain_importance(sentences)
    pool, total = [], 0
    for i in sorted(range(len(sentences)), key=lambda i: (-round(scores[i], 9), i)):
        pool.append(i)
        total += len(sentences[i])
        if total >= room:
            break
    return pool


@pytest.mark.parametrize("seed", range(30))
def test_importance_is_rouge_1_against_the_rest(seed: int):
    sentences = sentence_ids(seed, 2 + seed % 7)
    found = importance(np.concatenate(sentences), np.array(list(map(len, sentences))))
    np.testing.assert_allclose(found, plain_importance(sentences), rtol=1e-12)


def gaps(max_source: int = 1000, max_target: int = 100, **changed: Any) -> GapSentences:
    return GapSentences(Spans(MASKS, max_source, max_target, Corruption(**changed)), STOPS)


def taken_from(sentences: list[list[int]], made: Example) -> list[int]:
    """Find which sentences are missing, by reading source and target side by side, and check that nothing else is."""
    source, target = made.document.tolist(), made.summary.tolist()
    missing = []
    for i, one in enumerate(sentences):
        if source[:1] == [MASK]:
            source, missing = source[1:], [*missing, i]
            assert target[: len(one)] == one
            target = target[len(one) :]
        else:
            assert source[: len(one)] == one
            source = source[len(one) :]
    assert (source, target) == ([], [])
    return missing


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("seed", range(20))
def test_sentences_that_are_missing_can_be_put_back_and_fit(seed: int, choice: str):
    sentences = sentence_ids(seed, 2 + 3 * seed)
    n = sum(map(len, sentences))
    for max_target in (14, 31, 400):
        objective = gaps(max_target=max_target, gap_choice=choice)
        made = objective(document(np.concatenate(sentences)), dice(seed))
        missing = taken_from(sentences, made)
        assert 1 <= len(missing) < len(sentences)
        assert len(made.summary) <= max_target - 1
        assert len(missing) == 1 or len(made.summary) <= 0.3 * n


@pytest.mark.parametrize("seed", range(12))
def test_principal_sentences_are_drawn_from_the_best(seed: int):
    sentences = sentence_ids(seed, 11 + seed)
    n = sum(map(len, sentences))
    pool = plain_pool(sentences, max(min(99, 0.3 * n), 0.5 * n))
    made = [gaps()(document(np.concatenate(sentences)), dice(seed, draw)) for draw in range(60)]
    seen = [taken_from(sentences, one) for one in made]
    assert {i for chosen in seen for i in chosen} == set(pool)
    assert len({tuple(chosen) for chosen in seen}) > 2  # epochs differ


def test_without_choice_the_best_sentence_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(objectives, "BETTER", 0.0)
    for seed in range(20):
        sentences = sentence_ids(seed, 9)
        missing = taken_from(sentences, gaps(gap_density=1e-9)(document(np.concatenate(sentences)), dice(seed)))
        assert missing == plain_pool(sentences, 0)


def test_lead_takes_the_first_and_random_any():
    sentences = sentence_ids(3, 40)
    n = sum(map(len, sentences))
    text = document(np.concatenate(sentences))
    lead = {i for draw in range(60) for i in taken_from(sentences, gaps(gap_choice="lead")(text, dice(draw)))}
    reach = np.searchsorted(np.cumsum(list(map(len, sentences))), 0.5 * n) + 1
    assert lead == set(range(reach))
    chance = Counter(i for d in range(400) for i in taken_from(sentences, gaps(gap_choice="random")(text, dice(d))))
    assert set(chance) == set(range(40))


@pytest.mark.parametrize(
    "tokens",
    [[], [STOP], [11], [11, 12], [11, 12, STOP], [*range(11, 60)], [MASK, MASK], [MASK, STOP, MASK]],
    ids=str,
)
def test_a_document_without_a_sentence_to_spare_is_left_to_spans(tokens: list[int]):
    objective = gaps(max_target=20)
    made, same = objective(document(tokens), dice(1)), objective.spans(document(tokens), dice(1))
    assert made.document.tolist() == same.document.tolist()
    assert made.summary.tolist() == same.summary.tolist()
    assert len(made.document) >= 1


def test_sentences_longer_than_the_target_stay():
    long = [[*range(11, 40), STOP]] * 3
    made = gaps(max_target=20)(document(np.concatenate(long)), dice(1))
    assert put_back(made.document.tolist(), made.summary.tolist()) == long[0] * 3  # spans then
    mixed = [long[0], [11, 12, STOP], long[0]]
    for seed in range(10):
        assert taken_from(mixed, gaps(max_target=20)(document(np.concatenate(mixed)), dice(seed))) == [1]
    edge = [[11] * 19 + [STOP], [11] * 18 + [STOP]]  # with the end, 21 and 20
    assert taken_from(edge, gaps(max_target=20)(document(np.concatenate(edge)), dice(0))) == [1]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_document_is_cut_before_sentences_are_chosen(choice: str):
    whole = np.arange(11, 11 + 300)
    whole[4::5] = STOP  # every word once, so that a part tells where it is from
    starts = set()
    for seed in range(200):
        made = gaps(max_source=40, gap_choice=choice)(document(whole), dice(seed))
        assert sum(token != MASK for token in made.document) + len(made.summary) == 39
        words = [token for token in (*made.document, *made.summary) if token not in (MASK, STOP)]
        starts.add(min(words) - 11)
    assert starts == {0} if choice == "lead" else len(starts) > 100


# --------------------------------------------------------------------------------------------------------------------
# Where sentences end
# --------------------------------------------------------------------------------------------------------------------

TEXTS = [
    ["One is here.", " Two is there.", " And three"],
    ["Is it so?", " It is!", " Well… it was."],
    ["A first line\n", "a second one\n\n", "The third."],
    ["He said: “We did it.”", " “Did you?”", " (She asked.)", " 'Yes.'"],
    ["As in Smith et al. (2009) and in Fig. 2 by J. R. Smith, e.g. this one.", " That is all."],
    ["It fell by 3.5 percent, i.e. not much.", " 12 of 20 agreed (Figure 1B).", " We stopped."],
    ["It goes from a (as in part b).", " We stopped (at c?).", " Then we went on."],
    ["Two spaces. ", " Then more.\n ", " Indented.", " End"],
    ["这是第一句。", "这是第二句！", "第三句？", "末尾"],
    ["see example.com and v1.2.3 there, no end", "\n", "x"][:1],
    ["Élan ends.", " Élan begins."],
    ["."],
    [" "],
]


def metaspace(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of another kind: it marks words and not spaces, and its decoder drops the first."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    made.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>", "<mask>"]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", mask_token="<mask>"
    )


def split(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = SentenceMarks.of(tokenizer).ends(np.array(encoded["input_ids"], dtype=np.int64))
    places = [0, *(encoded["offset_mapping"][end - 1][1] for end in ends)]
    return [text[begin:end] for begin, end in pairwise(places)]


@pytest.mark.parametrize("parts", TEXTS, ids=lambda parts: parts[0][:12])
def test_sentences_end_where_they_do(parts: list[str]):
    learnt = train_tokenizer([ESSAY, *["".join(parts) for parts in TEXTS] * 9], 900)
    assert split(learnt, "".join(parts)) == parts


def test_sentences_end_where_they_do_for_another_kind_of_tokenizer():
    learnt = metaspace([ESSAY, "as in Fig. 2 et al. (2009) " * 9])
    text = "One is here. Two is there, as in Fig. 2 of Smith et al. It is the end. And more"
    assert [part.strip() for part in split(learnt, text)] == [
        "One is here.",
        "Two is there, as in Fig. 2 of Smith et al. It is the end.",
        "And more",
    ]
    assert len(split(metaspace([ESSAY.lower()]), "no capitals here. none at all.")) == 1


def test_marks_in_tokens_of_their_own_are_as_good(bytes_only: PreTrainedTokenizerFast):
    """What closes stands apart from what ends, and spaces from words."""
    for text in ("One.) Two.", 'One." Two.', "One. Two.", "One! Two."):
        assert split(bytes_only, text) in ([text[:-5], " Two."], [text[:-4], "Two."])


def test_what_is_stated_to_go_wrong_does():
    learnt = train_tokenizer([ESSAY] * 2, 700)
    assert split(learnt, "Yahoo! Inc is one. Take vitamin C. Then rest.") == [
        "Yahoo!",
        " Inc is one.",
        " Take vitamin C. Then rest.",
    ]


def test_what_closes_a_line_is_of_it():
    marks = SentenceMarks(np.array([0, objectives.BREAK.bit, objectives.CLOSER.bit], dtype=np.uint8))
    assert marks.ends(np.array([0, 1, 2, 2, 0, 1, 0, 2])).tolist() == [4, 6, 8]


def test_the_first_token_and_the_last_are_not_neighbours():
    learnt = train_tokenizer([ESSAY, "One is. (\nOne et al" * 9], 700)
    assert split(learnt, "One is. (") == ["One is. ("]
    assert split(learnt, ". Then et al") == [".", " Then et al"]


def test_there_is_no_sentence_in_nothing(tokenizer: PreTrainedTokenizerFast):
    assert SentenceMarks.of(tokenizer).ends(np.empty(0, dtype=np.int64)).tolist() == []


def test_the_essay_is_split_as_the_rule_for_texts_splits_it(tokenizer: PreTrainedTokenizerFast):
    from pyramidion.evaluation.splitting import by_rule

    ours = {part.strip() for part in split(tokenizer, ESSAY)} - {""}
    theirs = {part.strip() for part in by_rule(ESSAY)} - {""}
    assert len(theirs) > 20
    assert len(ours & theirs) >= 0.95 * max(len(ours), len(theirs))


# --------------------------------------------------------------------------------------------------------------------
# The token that stands for what is missing
# --------------------------------------------------------------------------------------------------------------------


def test_masks_are_the_mask_or_the_unknown_token_and_bytes_that_are_in_no_text(tokenizer: PreTrainedTokenizerFast):
    masks = find_masks(tokenizer, {0, 1, 2})
    assert masks[0] == tokenizer.unk_token_id == MASK
    assert len(set(masks)) == len(masks) == 14
    every = [*range(0xD800), *range(0xE000, 0x110000)]
    written = set("".join(map(chr, every)).encode())
    characters = bytes_to_unicode()
    unwritten = {characters[byte] for byte in range(256) if byte not in written}
    assert set(tokenizer.convert_ids_to_tokens(masks[1:])) == unwritten
    assert find_masks(tokenizer, {0, 1, 2, masks[5]}) == (*masks[:5], *masks[6:])
    other = metaspace([ESSAY, "ÀÁõö÷øùúûüýþÿ"])  # letters there
    assert find_masks(other, {0, 1}) == (other.mask_token_id,) == (3,)
    assert find_masks(other, {0, 1, 3}) == (other.unk_token_id,) == (2,)
    with pytest.raises(ValueError, match=r"`objective` must have a token .* Prepare again with one that has"):
        find_masks(tokenizer, {0, 1, 2, 3})


@settings(deadline=None, max_examples=300)
@given(text=st.text(max_size=40))
@example(text="ÀÁõö÷øùúûüýþÿ <unk> \U0010ffff\uffff\u07ff")
def test_no_text_is_ever_a_mask(bytes_only: PreTrainedTokenizerFast, text: str):
    """So a store made before there were objectives will do."""
    ids = bytes_only(text, add_special_tokens=False)["input_ids"]
    assert not set(ids) & set(find_masks(bytes_only))


def test_objectives_are_made_by_name(tokenizer: PreTrainedTokenizerFast):
    made = [make_objective(name, tokenizer, Corruption(), max_source=9, max_target=9) for name in objectives.OBJECTIVES]
    assert [type(one) for one in made] == [Summaries, Spans, GapSentences]
    text = document([11, 12])
    assert made[0](text, dice(0)) is text
    assert [str(one).split("(")[0] for one in made] == [
        "Learning to write summaries.",
        "Learning to write 1 tokens in 1 spans that are missing from 8.",
        "Learning to write sentences that are missing ",
    ]


# --------------------------------------------------------------------------------------------------------------------
# The same whenever asked
# --------------------------------------------------------------------------------------------------------------------


def objective_of(name: str, store: TokenStore) -> Any:
    return make_objective(name, store.tokenizer(), Corruption(), max_source=200, max_target=40)


def arrays(made: Example) -> tuple[list[int], list[int]]:
    return made.document.tolist(), made.summary.tolist()


@pytest.mark.parametrize("name", ["spans", "gap-sentences"])
def test_an_exercise_is_a_function_of_seed_epoch_and_index(name: str, store: TokenStore):
    train, objective = store["train"], objective_of(name, store)
    exercises = Exercises(train, objective, seed=7)
    first = {(epoch, i): arrays(exercises[epoch, i]) for epoch in range(3) for i in range(len(train))}
    again = Exercises(store["train"], objective_of(name, store), seed=7)
    for epoch, i in reversed(first):
        assert arrays(again[epoch, i]) == first[epoch, i]
    assert all(first[0, i] != first[1, i] != first[2, i] != first[0, i] for i in range(len(train)))
    elsewhere = pickle.loads(pickle.dumps(exercises))  # as a worker process gets it
    assert arrays(elsewhere[2, 5]) == first[2, 5]
    other = Exercises(train, objective, seed=8)
    assert all(arrays(other[0, i]) != first[0, i] for i in range(len(train)))


def test_random_numbers_are_used_once(store: TokenStore):
    """Neither another example, nor another epoch, nor the order of batches draws the same, zeros included."""
    drawn: list[float] = []

    def spy(example: Example, random: np.random.Generator) -> Example:
        drawn.append(random.random())
        return example

    for seed in range(3):
        exercises = Exercises(store["train"], spy, seed)
        for epoch in range(4):
            drawn.append(np.random.default_rng([seed, epoch]).random())  # as LengthGroupedBatches draws
            for i in range(9):
                exercises[epoch, i]
    assert len(set(drawn)) == len(drawn) == 3 * 4 * 10


@pytest.mark.parametrize("name", ["spans", "gap-sentences"])
def test_an_exercise_does_not_depend_on_its_batch_or_process(name: str, store: TokenStore):
    """Rows of every loader, of one process and of three, in batches of two and of five."""
    train, collate = store["train"], Collator(max_source=200, max_target=40)
    exercises = Exercises(train, objective_of(name, store), seed=7)

    def rows(batch: int, rank: int, world: int) -> dict[int, list[tuple[list[int], list[int]]]]:
        batches = LengthGroupedBatches(train.document_lengths, batch, seed=7, rank=rank, world=world)
        keys: Any = EpochBatches(batches)
        loader = EpochLoader(exercises, batch_sampler=keys, collate_fn=collate)  # type: ignore[arg-type]
        found: dict[int, list[tuple[list[int], list[int]]]] = {}
        for epoch in (1, 0, 1):
            loader.set_epoch(epoch)
            for places, tensors in zip(batches, loader, strict=True):
                for i, ids, mask, labels in zip(places, *tensors.values(), strict=True):
                    row = ids[mask.bool()].tolist(), labels[labels >= 0].tolist()
                    found.setdefault(1000 * epoch + i, []).append(row)
        return found

    alone = rows(5, 0, 1)
    assert len(alone) == 2 * len(train)
    for key, found in alone.items():
        source, target = arrays(exercises[divmod(key, 1000)])
        assert found[0] == ([*source, EOS], [*target, EOS])
    for rank in range(3):
        for key, others in rows(2, rank, 3).items():
            assert others == [alone[key][0]] * len(others)


def test_batches_still_group_by_length(store: TokenStore):
    """What is padded is as little as without corruption, give or take."""
    train = store["train"]
    shares = []
    for name in ("summaries", "spans"):
        exercises = Exercises(
            train, make_objective(name, store.tokenizer(), Corruption(), max_source=999, max_target=99), 0
        )
        real = total = 0
        for batch in EpochBatches(LengthGroupedBatches(train.document_lengths, 4, seed=0)):
            mask = Collator(max_source=999)([exercises[key] for key in batch])["attention_mask"]
            real, total = real + int(mask.sum()), total + mask.numel()
        shares.append(real / total)
    assert shares[1] > 0.9
    assert shares[1] == pytest.approx(shares[0], abs=0.01)
