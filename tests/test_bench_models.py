"""Benchmarks of whole models: matched peers, forced lengths, rows that survive each other, tables that add up."""

import itertools
import json
import logging
import math
import sys

import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

from pyramidion import cli
from pyramidion.bench import generate, length, measure, models, peers, profile, rows, table
from pyramidion.bench.peers import Candidate
from pyramidion.presets import DROPOUTS, PRESETS

TINY = peers.names("tiny")


def invoke(*arguments):
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def quick(page, **given):
    return page.default_settings("cpu", quick=True, **given)


def sheet_of(page, settings, folder, name="x", **options):
    benchmark = page.__name__.rpartition(".")[2]
    return rows.Sheet(folder, name, benchmark, models.settings_dict(settings), **options)


def bench_of(name, **given):
    sizes = {"n": 256, "batch": 2, "device": "cpu", "dtype": "float32", "repeats": 1}
    return models.Bench(peers.candidate(name, "tiny", 256, 16), **sizes | given)


def measured(ms, gib=1.0, **more):
    return {"ms": ms, "lower_ms": ms, "upper_ms": ms, "host_ms": ms, "repeats": 1, "gib": gib, **more}


@pytest.fixture
def known_commit(monkeypatch):
    monkeypatch.setenv("PYRAMIDION_COMMIT", "abc")


@pytest.fixture
def no_clock(monkeypatch):
    """Call once instead of timing, and count the calls."""
    calls = []

    def clock(fn, **_):
        fn()
        calls.append(fn)
        return measured(float(len(calls)))

    monkeypatch.setattr(rows, "clock", clock)
    return calls


class TestPeers:
    @pytest.mark.parametrize("name", peers.names("deep"))
    def test_sizes_match_at_full_size(self, name):
        target = PRESETS["deep-pyramidion"].parameters
        every, matched = peers.candidate(name, "deep", 16384, 512).parameters()
        assert abs(matched / target - 1) < 0.1
        tables = {"led": 16384 + 1024, "bart": 2 * 16384, "bigbird-pegasus": 2 * 16384}.get(name, 0)
        assert every - matched == pytest.approx(tables * 768, rel=0.01)

    @pytest.mark.parametrize("name", TINY)
    def test_a_step_moves_the_weights_in_training_mode(self, name, monkeypatch):
        seen, built = {}, []
        build = Candidate.build
        monkeypatch.setattr(Candidate, "build", lambda *args, **how: built.append(build(*args, **how)) or built[-1])

        def clock(fn, **_):
            model = built[-1]
            before = [weight.detach().clone() for weight in model.parameters()]
            fn()
            moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            seen.update(training=model.training, moved=sum(moved) / len(moved))
            return measured(1.0)

        monkeypatch.setattr(rows, "clock", clock)
        bench_of(name).train(peers.attentions(peers.candidate(name, "tiny", 256, 16))[0][0], 8)
        assert seen["training"]
        assert seen["moved"] > 0.5

    @pytest.mark.parametrize(("name", "beams"), list(itertools.product(TINY, (1, 2))))
    def test_exactly_the_forced_tokens_are_written(self, name, beams, monkeypatch):
        lengths = []
        monkeypatch.setattr(models.engine, "generate", self.recorded(models.engine.generate, lengths))
        candidate = peers.candidate(name, "tiny", 256, 16)
        model = candidate.build("cpu", peers.attentions(candidate)[0][0]).eval()
        monkeypatch.setattr(model, "generate", self.recorded(model.generate, lengths))
        ids = torch.randint(3, 1000, (2, 256))
        with rows.quiet():
            for writer in ("engine",) if candidate.ours else ("dynamic cache", "static cache"):
                models.writing(model, ids, 11, beams, writer)()
        assert lengths
        assert set(lengths) == {12}

    @staticmethod
    def recorded(write, lengths):
        def recording(*arguments, **options):
            written = write(*arguments, **options)
            lengths.append(written.shape[1])
            return written

        return recording

    def test_too_few_tokens_are_not_taken_for_a_fast_model(self, monkeypatch):
        monkeypatch.setattr(models.engine, "generate", lambda model, ids, *_: ids[:, :5])
        row = rows.attempt(lambda: bench_of("tiny-pyramidion").write("sdpa", 8, 1, "engine"))
        assert row == {"skipped": "it wrote 4 tokens where 8 were forced"}

    def test_the_same_seed_gives_the_same_weights_and_documents(self):
        candidate = peers.candidate("led", "tiny", 256, 16)
        first, second = (candidate.build("cpu", seed=3).state_dict() for _ in range(2))
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert torch.equal(bench_of("led")._tokens(9), bench_of("bart")._tokens(9))
        assert bench_of("led")._tokens(9).min() >= models.FIRST_TOKEN

    def test_the_best_attention_that_works_is_used_and_the_others_say_why(self):
        usable, refused = peers.attentions(peers.candidate("led", "tiny", 256, 16))
        assert usable == ["eager"]
        assert refused["sdpa"] == "not supported by the model"
        assert peers.attentions(peers.candidate("bart", "tiny", 256, 16))[0][0] == "sdpa"

    def test_forms_differ_in_what_the_encoder_does(self):
        pyramidion, blockwise, full = (peers.scale_config("deep", form) for form in peers.FORMS)
        inner = {"attention_dropout": 0.0, "activation_dropout": 0.0}
        assert blockwise.to_dict() == PRESETS["deep-blockwise"].config().to_dict() | inner
        assert pyramidion.to_dict() == PRESETS["deep-pyramidion"].config().to_dict() | inner
        assert (full.attention, full.encoder_lengths) == ("full", [8192] * 6)

    def test_dropout_is_the_same_for_all_that_can_be_told(self):
        described = [peers.candidate(name, "deep", 2048).describe() for name in peers.names("deep")]
        rates = {one["model"]: [one[rate] for rate in DROPOUTS] for one in described}
        assert rates.pop("longt5-local") == rates.pop("longt5-tglobal") == [0.1, 0.1, 0.1]
        assert all(found == [0.1, 0.0, 0.0] for found in rates.values()), rates


class TestRows:
    def test_a_failure_is_a_row_and_the_run_goes_on(self, tmp_path, monkeypatch, no_clock):
        steps = {
            "led": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
            "bart": RuntimeError("operation failed due to a previous error during capture\nmore"),
            "pegasus-x": rows.Skipped("one call took 9 s, the budget is 2 s"),
        }
        honest = models.Bench.train

        def train(self, *arguments, **options):
            if self.candidate.name in steps:
                raise steps[self.candidate.name]
            return honest(self, *arguments, **options)

        monkeypatch.setattr(models.Bench, "train", train)
        settings = quick(models, measures=("train",))
        sheet = sheet_of(models, settings, tmp_path)
        models.run(settings, sheet)
        reasons = {row["model"]: row.get("skipped") for row in sheet.rows}
        assert reasons.pop("led") == "out of memory"
        assert reasons.pop("bart") == "RuntimeError: operation failed due to a previous error during capture"
        assert reasons.pop("pegasus-x") == "one call took 9 s, the budget is 2 s"
        assert list(reasons.values()) == [None] * 5
        text = rows.publish(models, sheet.document, tmp_path, sheet.stem)[0].read_text()
        assert "| led | out of memory |" in text

    def test_the_budget_is_for_a_warm_call(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(rows, "perf_counter", lambda: now[0])
        monkeypatch.setattr(measure, "peak_extra_memory", lambda fn, device: 5 << 30)

        def work(*seconds):
            times = iter(seconds)

            def fn():
                now[0] += next(times, seconds[-1])

            return fn

        options = {"device": "cpu", "repeats": 7, "held": 1 << 30}
        assert rows.clock(work(7, 0.1), budget=2, **options)["repeats"] == 7
        assert rows.clock(work(3, 1.0), budget=4, **options)["repeats"] == 2
        assert rows.clock(work(0.1), budget=4, **options)["gib"] == 6
        assert rows.clock(work(9, 0.1), budget=2, patient=True, **options)["repeats"] == 7
        with pytest.raises(rows.Skipped, match=r"one call took 3 s, the budget is 2 s"):
            rows.clock(work(7, 3), budget=2, **options)
        with pytest.raises(rows.Skipped, match=r"one call took 9 s, the budget is 2 s"):
            rows.clock(work(9, 0.1), budget=2, **options)

    def test_the_fastest_way_counts_and_all_are_recorded(self):
        ways = {"a": lambda: measured(3.0), "b": lambda: measured(2.0), "c": lambda: 1 / 0}
        row = rows.best_of(ways, "cpu")
        assert (row["way"], row["ms"]) == ("b", 2.0)
        assert [way["way"] for way in row["ways"]] == ["a", "b", "c"]
        assert row["ways"][2]["skipped"] == "ZeroDivisionError: division by zero"
        assert rows.best_of({"c": lambda: 1 / 0}, "cpu")["skipped"] == "ZeroDivisionError: division by zero"

    def test_a_lost_device_ends_the_run_with_the_row_on_disk(self, tmp_path, monkeypatch, no_clock):
        monkeypatch.setattr(rows, "alive", lambda device: False)
        settings = quick(models, models=TINY[:2], measures=("encode",))
        sheet = sheet_of(models, settings, tmp_path)
        models.run(settings, sheet)
        written = json.loads(sheet.path.read_text())
        assert len(written["rows"]) == written["left"] == 1
        assert written["stopped"].startswith("the GPU no longer answers")

    def test_the_limit_stops_before_a_row(self, tmp_path, monkeypatch, no_clock):
        now = itertools.count()
        monkeypatch.setattr(rows, "perf_counter", lambda: float(next(now)))
        settings = quick(models, models=TINY[:2], measures=("encode", "train"), limit=4.0)
        sheet = sheet_of(models, settings, tmp_path)
        models.run(settings, sheet)
        assert 1 <= len(sheet.rows) < 4
        assert sheet.left == 4 - len(sheet.rows)
        text = rows.publish(models, sheet.document, tmp_path, sheet.stem)[0].read_text()
        assert f"**Not complete**: {sheet.left} rows are left; the limit of 4 s was reached" in text

    def test_without_matplotlib_there_is_a_note_and_drawing_later(self, tmp_path, monkeypatch, no_clock):
        settings = quick(models, models=TINY[:2], measures=("encode",))
        sheet = sheet_of(models, settings, tmp_path)
        models.run(settings, sheet)
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "matplotlib", None)
            without.setattr(rows, "find_spec", lambda name: None)
            (page,) = rows.publish(models, sheet.document, tmp_path, sheet.stem)
        assert f"`pyramidion bench draw {sheet.stem}.json` draws them" in page.read_text()
        done = invoke("bench", "draw", sheet.path)
        assert done.exit_code == 0, done.output
        assert f"({sheet.stem}_encode.png)" in page.read_text()
        assert (tmp_path / f"{sheet.stem}_encode.png").read_bytes().startswith(b"\x89PNG")

    def test_what_the_library_warns_of_is_kept(self, tmp_path):
        def work(case):
            logging.getLogger("pyramidion.generation").warning("%s: not supported", "this")
            return measured(1.0)

        settings = quick(models)
        sheet = sheet_of(models, settings, tmp_path)
        sheet.facts["models"] = []
        sheet.fill(models.cases(settings)[:3], work, lambda *_: None)
        assert sheet.document["told"] == ["this: not supported"]
        text = rows.publish(models, sheet.document, tmp_path, sheet.stem)[0].read_text()
        assert "## What the library warned of\n\n- this: not supported" in text


class TestModels:
    def test_a_small_run_leaves_nothing_out(self, tmp_path):
        chosen = "tiny-pyramidion,tiny-blockwise,bart"
        options = ("--quick", "--device", "cpu", "--models", chosen, "--tokens", 3, "--output", tmp_path)
        done = invoke("bench", "models", *options)
        assert done.exit_code == 0, done.output
        (path,) = tmp_path.glob("models-quick_cpu-*.json")
        written = json.loads(path.read_text())
        assert next(iter(written)) == "machine"
        keys = {(row["model"], row["measure"]) for row in written["rows"]}
        assert keys == set(itertools.product(chosen.split(","), models.MEASURES))
        for row in written["rows"]:
            assert 0 < row["lower_ms"] <= row["ms"] <= row["upper_ms"]
            assert row["repeats"] == 2
            assert row["gib"] > 0
            assert row["ms"] == min(way["ms"] for way in row["ways"])
        ways = {row["model"]: [way["way"] for way in row["ways"]] for row in written["rows"] if row["tokens"] == 3}
        assert ways["tiny-pyramidion"] == ["sdpa, engine"]
        assert ways["bart"] == ["sdpa, dynamic cache", "sdpa, static cache"]
        counted = {model["model"]: model["parameters"] for model in written["models"]}
        assert counted["tiny-pyramidion"] == PRESETS["tiny-pyramidion"].parameters
        text = path.with_suffix(".md").read_text()
        assert "| tiny-pyramidion | " in text
        assert "## 256 tokens, batch 2" in text
        for what in models.MEASURES:
            assert path.with_name(f"{path.stem}_{what}.png").stat().st_size > 10_000

    def test_ratios_are_to_the_pyramidion(self):
        settings = {"scale": "tiny", "models": ["tiny-pyramidion", "led"], "measures": ["train"]}
        found = [{"model": "led", "measure": "train", **measured(30.0)}]
        found += [{"model": "tiny-pyramidion", "measure": "train", **measured(10.0)}]
        lines = models.pivot(found, settings)
        assert [(line["model"], line["train_ratio"]) for line in lines] == [("tiny-pyramidion", 1.0), ("led", 3.0)]

    def test_compiling_is_tried_on_all_and_both_are_recorded(self, monkeypatch, no_clock):
        compiled = []
        monkeypatch.setattr(torch, "compile", lambda model: compiled.append(type(model).__name__) or model)
        settings = quick(models, compile=True)
        for name in ("tiny-pyramidion", "led"):
            case = next(case for case in models.cases(settings) if case["model"] == name)
            row = models.measure_case(case, settings)
            assert [way["way"].partition(", ")[2] for way in row["ways"]] == ["", "compiled"]
        assert compiled == ["PyramidionForConditionalGeneration", "LEDForConditionalGeneration"]

    def test_bfloat16_reaches_weights_and_autocast(self, monkeypatch):
        seen = []
        monkeypatch.setattr(rows, "clock", lambda fn, **_: fn() or measured(1.0))
        build = Candidate.build

        def hooked(self, *arguments, **options):
            model = build(self, *arguments, **options)
            layer = model.get_encoder().layers[0].feed_forward.widen
            layer.register_forward_hook(lambda layer, _, out: seen.append((layer.weight.dtype, out.dtype)))
            return model

        monkeypatch.setattr(Candidate, "build", hooked)
        bench_of("tiny-pyramidion", dtype="bfloat16").train("sdpa", 8)
        bench_of("tiny-pyramidion", dtype="bfloat16").encode("sdpa")
        assert seen == [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]


class TestTable:
    def test_a_second_run_measures_nothing(self, tmp_path, known_commit, no_clock):
        settings = quick(table, presets=table.DEEP, tokens=(2, 3), depths=(2,))
        first = sheet_of(table, settings, tmp_path)
        table.run(settings, first)
        wanted = 2 * 3 + 3
        assert len(first.rows) == len(no_clock) == wanted
        second = sheet_of(table, settings, tmp_path)
        table.run(settings, second)
        assert len(no_clock) == second.taken == wanted
        assert second.rows == first.rows
        more = quick(table, presets=table.DEEP, tokens=(2, 3, 4), depths=(2,))
        table.run(more, sheet_of(table, more, tmp_path))
        assert len(no_clock) == wanted + 2

    def test_rows_of_another_commit_name_or_machine_are_not_taken(self, tmp_path, known_commit, no_clock, monkeypatch):
        settings = quick(table, presets=table.DEEP, parts=("depth",), depths=(2,))
        table.run(settings, sheet_of(table, settings, tmp_path))
        assert sheet_of(table, settings, tmp_path).taken == 3
        assert sheet_of(table, settings, tmp_path, name="y").taken == 0
        assert sheet_of(table, settings, tmp_path, fresh=True).taken == 0
        for key, value in (("torch", "9"), ("device", "CPU, 99 cores"), ("commit", "unknown"), ("commit", "def")):
            with monkeypatch.context() as other:
                machine = {**measure.machine("cpu"), key: value}
                other.setattr(measure, "machine", lambda device, machine=machine: machine)
                assert sheet_of(table, settings, tmp_path).taken == 0

    def test_rows_of_an_older_commit_are_taken_if_asked_and_say_so(self, tmp_path, known_commit, no_clock, monkeypatch):
        settings = quick(table, presets=table.DEEP, parts=("depth",), depths=(2,))
        table.run(settings, sheet_of(table, settings, tmp_path))
        before = measure.machine("cpu")["commit"]
        machine = {**measure.machine("cpu"), "commit": "0123456789abcdef"}
        monkeypatch.setattr(measure, "machine", lambda device: machine)
        more = quick(table, presets=table.DEEP, parts=("depth",), depths=(2, 4))
        second = sheet_of(table, more, tmp_path, older=True)
        assert second.taken == 3
        table.run(more, second)
        assert [row["commit"] for row in second.rows] == [before] * 3 + ["0123456789abcdef"] * 3
        page = rows.publish(table, second.document, tmp_path, second.stem)[0].read_text()
        assert f"more than one commit: 3 at {before[:10]}, 3 at 0123456789." in page
        assert sheet_of(table, more, tmp_path).taken == 6  # all in one file now
        for key, value in (("torch", "9"), ("device", "CPU, 99 cores"), ("commit", "unknown")):
            monkeypatch.setattr(measure, "machine", lambda device, changed={key: value}: {**machine, **changed})
            assert sheet_of(table, more, tmp_path, older=True).taken == 0

    def test_parts_of_a_sheet_add_up(self, tmp_path, known_commit, no_clock):
        def run(limit=None, **asked):
            settings = quick(models, lengths=(256,), batches=(1,), limit=limit, **asked)
            sheet = sheet_of(models, settings, tmp_path)
            models.run(settings, sheet)
            return sheet.document, rows.publish(models, sheet.document, tmp_path, sheet.stem)[0].read_text()

        all_four = {"models": ("tiny-pyramidion", "led"), "measures": ("train", "encode")}
        document, page = run(limit=1e-9, **all_four)
        assert (document["left"], len(document["rows"])) == (4, 0)
        assert "**Not complete**: 4 rows are left; the limit" in page
        document, page = run(models=("led", "bart"), measures=("encode",))
        assert [one["model"] for one in document["models"]] == ["tiny-pyramidion", "led", "bart"]
        assert document["settings"]["models"] == ["tiny-pyramidion", "led", "bart"]
        assert document["settings"]["measures"] == ["train", "encode"]
        assert (document["left"], len(document["rows"])) == (3, 2)
        assert "**Not complete**: 3 rows are left; a run for a part of them was the last." in page
        document, page = run(**all_four)
        assert (document["left"], document["open"], len(document["rows"])) == (0, [], 5)
        assert "Not complete" not in page

    def test_what_is_computed_from_all_rows_is_not_joined(self):
        first = {
            "names": ["a"],
            "models": [{"model": "a", "x": 1}],
            "times": [{"what": "train", "s": 1}],
            "n": {"a": 1},
        }
        second = {
            "names": ["b"],
            "models": [{"model": "a", "x": 2}],
            "times": [{"what": "train", "s": 2}],
            "n": {"b": 2},
        }
        assert rows._joined(first, second) == {
            "names": ["a", "b"],
            "models": [{"model": "a", "x": 2}],
            "times": [{"what": "train", "s": 2}],
            "n": {"a": 1, "b": 2},
        }
        assert rows._joined({}, second) == second

    def test_an_unknown_commit_is_not_the_same_as_another(self, tmp_path, no_clock, monkeypatch):
        machine = {**measure.machine("cpu"), "commit": "unknown", "dirty": None}
        monkeypatch.setattr(measure, "machine", lambda device: machine)
        settings = quick(table, presets=table.DEEP, parts=("depth",), depths=(2,))
        table.run(settings, sheet_of(table, settings, tmp_path))
        assert sheet_of(table, settings, tmp_path).taken == 0

    def test_every_row_of_the_paper_is_there_once(self):
        names = table.paper_presets()
        assert len(names) == len(set(names)) == 28 + 7 + 2
        assert {"row-1", "row-32", "scorer-random", *table.DEEP} <= set(names)
        wanted = table.Settings(device="cuda", presets=names)
        keys = {(case["preset"], case["dtype"], case["what"], case["batch"]) for case in table.cases(wanted)}
        assert ("row-3", "float32", "train", 64) in keys
        assert ("row-3", "bfloat16", "write", 8) in keys
        assert len(table.cases(wanted)) == 2 * 37 * 3 + 6 * 3  # depth by the fastest numbers alone

    def test_a_batch_that_does_not_fit_is_scaled_and_says_so(self, monkeypatch):
        def train(self, *_, **__):
            if self.batch > 16:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return measured(self.batch * 2.0)

        monkeypatch.setattr(models.Bench, "train", train)
        row = table.train_scaled(bench_of("tiny-full", batch=64), 8, ("",))
        assert (row["ms"], row["lower_ms"], row["measured_batch"], row["scaled"]) == (128.0, 128.0, 16, 4)
        assert table._seconds(row) == "0.128 (batch 16)"
        assert table.train_scaled(bench_of("tiny-full", batch=48), 8, ("",))["measured_batch"] == 16
        assert "scaled" not in table.train_scaled(bench_of("tiny-full", batch=8), 8, ("",))

    def test_speedups_and_the_papers_columns(self):
        def row(preset, what, ms, tokens=512):
            return {"part": "rows", "preset": preset, "what": what, "tokens": tokens, "dtype": "float32", "ms": ms}

        found = [row("deep-blockwise", "train", 900.0), row("deep-pyramidion", "train", 450.0)]
        found += [row("deep-blockwise", "write", 800.0), row("deep-pyramidion", "write", 200.0)]
        told = table.speedups(found, (512,))
        assert [(line["what"], line["times"], line["paper"]) for line in told] == [
            ("training", 2.0, 1.8),
            ("writing 512 tokens", 4.0, 4.5),
        ]
        document = {"rows": found, "settings": {"tokens": [512], "dtypes": ["float32"]}}
        line = table.paper_lines(document)[1]
        assert (line["preset"], line["train paper"], line["write-512 paper"]) == ("deep-pyramidion", 2.71, 8.12)
        assert (line["train float32"], line["write-512 float32"]) == (0.45, 0.2)

    def test_depths_pool_to_512(self):
        assert table.depth_config(table.FAMILIES[2], 2).to_dict() == PRESETS["row-21"].config().to_dict()
        assert table.depth_config(table.FAMILIES[2], 3).to_dict() == PRESETS["row-22"].config().to_dict()
        assert table.depth_config(table.FAMILIES[2], 16).encoder_lengths == [8192, 2048, *[512] * 14]
        assert table.depth_config("vanilla", 6).encoder_lengths == [8192] * 6
        assert table.depth_config("blockwise", 6).attention == "blockwise"

    def test_the_command_writes_all(self, tmp_path, no_clock):
        done = invoke("bench", "table", "--quick", "--device", "cpu", "--tokens", "2,3", "--output", tmp_path)
        assert done.exit_code == 0, done.output
        (path,) = tmp_path.glob("table-quick_*.json")
        assert {row["part"] for row in json.loads(path.read_text())["rows"]} == {"rows", "depth"}
        for heading in ("## Speed-ups", "## Rows of the paper", "## Depth", "**Every length is divided by 64.**"):
            assert heading in done.stdout
        assert "| deep-blockwise | blockwise | 8192 → 8192×6 | 4.85 |" in done.stdout
        assert path.with_name(f"{path.stem}_depth.png").stat().st_size > 10_000


class TestLength:
    def test_break_even_is_where_the_powers_cross(self):
        exact = {n: (n * 1000.0, n**2 * 1.0) for n in (256, 512, 1024, 2048)}  # cross at 1000
        assert length.break_even(exact) == pytest.approx(1000)
        assert length.break_even(dict.fromkeys((256, 512), (9.0, 5.0))) is None
        assert length.break_even(dict.fromkeys((256, 512), (5.0, 9.0))) == 256
        assert length.break_even({}) is None
        twice = {256: (1.0, 2.0), 512: (2.0, 1.0), 1024: (1.0, 2.0)}  # it pays, then not, then for good
        assert length.break_even(twice) == pytest.approx(math.sqrt(512 * 1024))
        assert length.break_even({256: (9.0, 1.0), 512: (2.0, 1.0), 1024: (1.0, 2.0)}) == length.break_even(twice)
        assert length.break_even({256: (1.0, 2.0), 512: (2.0, 1.0)}) is None

    def test_the_longest_is_bisected(self):
        tried = []

        def step(n):
            tried.append(n)
            return measured(7.0) if n <= 3_000_000 else {"skipped": "out of memory"}

        found = length.bisect(step, 2**21, 2**22, 0.1)
        assert found["n"] <= 3_000_000 < found["fails"] <= 1.1 * found["n"] + length.GRAIN
        assert len(tried) <= 5
        assert found["seconds_a_step"] == 0.007

    def test_a_length_that_cannot_be_is_not_tried(self, monkeypatch):
        settings = length.default_settings("cpu", quick=True, budget=2.0)
        case = {"model": "tiny-full", "n": 512, "what": "step", "recompute": False}
        before = {**case, "n": 256}
        for row, reason in (
            ({**before, "skipped": "out of memory"}, "out of memory at 256 tokens already"),
            ({**before, "skipped": "one call took 3 s, the budget is 2 s"}, "over budget at 256 tokens already"),
            ({**before, **measured(1100.0)}, "one call took 1.1 s at 256 tokens, twice that is over the budget"),
            ({**before, **measured(1.0, gib=1e6)}, "out of memory: four times the 1000000.0 GiB of 256 tokens"),
        ):
            with pytest.raises(rows.Skipped, match=reason):
                length.measure_case(case, settings, [row])
        monkeypatch.setattr(models.Bench, "train", lambda *_, **__: measured(5.0))
        other = {**before, "model": "tiny-blockwise", "skipped": "out of memory"}
        assert length.measure_case(case, settings, [other, {**before, **measured(1.0, gib=0)}])["ms"] == 5.0

    def test_the_command_finds_the_longest_and_the_break_even(self, tmp_path, monkeypatch):
        def train(self, *_, **__):
            assert self.recompute
            if self.n > {"tiny-full": 1500, "tiny-blockwise": 3500}.get(self.candidate.name, 8000):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return measured(self.n**2 / 512 if self.candidate.name == "tiny-full" else float(self.n))

        monkeypatch.setattr(models.Bench, "train", train)
        options = ("--quick", "--device", "cpu", "--longest", "--most", 4096, "--recompute", "--budget", 99)
        done = invoke("bench", "length", *options, "--output", tmp_path)
        assert done.exit_code == 0, done.output
        (path,) = tmp_path.glob("length-quick_*.json")
        written = json.loads(path.read_text())
        assert written["break_even"][0]["time_n"] == pytest.approx(512, rel=1e-6)
        longest = {row["model"]: row for row in written["rows"] if row["what"] == "longest"}
        assert longest["tiny-pyramidion"]["bound"] == "the longest that was asked for, `most` = 4096"
        assert (longest["tiny-blockwise"]["n"], longest["tiny-blockwise"]["fails"]) == (3072, 4096)
        assert "out of memory at 2048 tokens already" in done.stdout
        for what in ("time", "memory"):
            assert path.with_name(f"{path.stem}_{what}.png").stat().st_size > 10_000

    def test_recomputing_saves_memory(self):
        kept, again = (
            bench_of("tiny-blockwise", n=512, recompute=whether).train("sdpa", 8) for whether in (False, True)
        )
        assert again["gib"] < 0.8 * kept["gib"]


class TestGenerate:
    def test_a_small_run_leaves_nothing_out(self, tmp_path, no_clock):
        done = invoke(
            "bench", "generate", "--quick", "--device", "cpu", "--tokens", 3, "--batches", 2, "--output", tmp_path
        )
        assert done.exit_code == 0, done.output
        (path,) = tmp_path.glob("generate-quick_*.json")
        written = json.loads(path.read_text())
        assert len(written["rows"]) == 2 * 5
        assert written["copy_bandwidth"] > 0
        keys = {(row["model"], row["writer"]) for row in written["rows"]}
        assert ("led", "engine") not in keys
        assert {("led", "transformers"), ("tiny-pyramidion", "engine"), ("tiny-pyramidion", "transformers")} <= keys
        assert "## Batch 2, beam 2" in done.stdout
        assert path.with_name(f"{path.stem}_beam2.png").stat().st_size > 10_000

    def test_the_bytes_of_a_token(self):
        d, layers, wide, words, n, batch, tokens = 768, 6, 3072, 32768, 8192, 8, 513
        weights = layers * (6 * d * d + 2 * d * wide) + words * d
        for name, memory in (("deep-pyramidion", 512), ("deep-blockwise", n), ("led", n), ("longt5-local", n)):
            cached = 2 * layers * d * batch * (memory + 256)
            candidate = peers.candidate(name, "deep", n, tokens)
            assert generate.step_bytes(candidate, n, tokens, batch, 1, 2) == 2 * (weights + cached)
        beams = generate.step_bytes(candidate, n, tokens, batch, 2, 2)
        assert beams == 2 * (weights + 2 * layers * d * batch * (n + 2 * 256))

    def test_rows_measured_again_stand_where_they_stood(self):
        rows = [
            {"model": model, "writer": writer, "batch": 8, "beams": 1, "ms": ms}
            for ms, (model, writer) in enumerate(
                (("led", "transformers"), ("deep-blockwise", "transformers"), ("deep-blockwise", "engine"),
                 ("deep-pyramidion", "engine")), 1,
            )
        ]  # fmt: skip
        found = generate.parts({"rows": rows, "settings": {"scale": "deep"}})[8, 1]
        assert [(row["model"], row["writer"], row["ratio"]) for row in found] == [
            ("deep-pyramidion", "engine", 1.0), ("deep-blockwise", "engine", 0.75),
            ("deep-blockwise", "transformers", 0.5), ("led", "transformers", 0.25),
        ]  # fmt: skip

    def test_encoding_is_taken_off(self):
        told = generate.account(ms=30.0, encode_ms=10.0, tokens=10, read=1e6, bandwidth=1e9)
        assert (told["alone_ms"], told["token_ms"], told["limit_ms"]) == (20.0, 2.0, 1.0)
        assert told["share"] == pytest.approx(0.5)
        assert "share" not in generate.account(ms=9.0, encode_ms=10.0, tokens=10, read=1e6, bandwidth=1e9)


class TestProfile:
    def test_times_of_overlapping_kernels_add_up_to_the_whole(self):
        spans = [
            ("b", 2.0, 9.0),
            ("a", 0.0, 4.0),
            ("c", 3.0, 8.0),
            ("a", 12.0, 15.0),
            ("d", 12.5, 13.0),
            ("e", 15.0, 15.0),
        ]
        told = profile.account(profile.Span(*span) for span in spans)
        added = {kernel["name"]: (kernel["launches"], kernel["ms"], kernel["own_ms"]) for kernel in told["kernels"]}
        assert added == {
            **{"a": (2, 4.0 + 2.5, 7.0), "c": (1, 4.0, 5.0), "b": (1, 1.0, 7.0)},
            **{"d": (1, 0.5, 0.5), "e": (1, 0.0, 0.0)},
        }
        assert (told["whole_ms"], told["idle_ms"]) == (15.0, 3.0)
        assert [kernel["name"] for kernel in told["kernels"]][:2] == ["a", "c"], "the longest first"
        assert profile.account([]) == {"whole_ms": 0.0, "idle_ms": 0.0, "kernels": []}

    @pytest.mark.parametrize("seed", range(20))
    def test_no_time_is_lost_or_counted_twice(self, seed):
        generator = torch.Generator().manual_seed(seed)
        starts = (torch.rand(60, generator=generator) * 50).tolist()
        ends = [
            start + length for start, length in zip(starts, torch.rand(60, generator=generator).tolist(), strict=True)
        ]
        told = profile.account(profile.Span("k", *span) for span in zip(starts, ends, strict=True))
        moments = torch.linspace(min(starts), max(ends), 200_001)
        running = sum(((moments >= start) & (moments < end) for start, end in zip(starts, ends, strict=True)))
        busy = told["whole_ms"] * (running > 0).double().mean().item()
        assert told["kernels"][0]["ms"] == pytest.approx(busy, abs=0.02)
        assert told["kernels"][0]["ms"] + told["idle_ms"] == pytest.approx(max(ends) - min(starts))

    @pytest.mark.parametrize(
        ("kernel", "part"),
        [
            ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "products"),
            ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "products"),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_6_128x64x128_4x1x1", "attention"),
            ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float>", "attention"),
            ("void at::native::cunn_SoftMaxForward<4, LogSoftMaxForwardEpilogue>", "searching and sorting"),
            ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>", "searching and sorting"),
            ("void at::native::bitonicSortKVInPlace<2, -1, 16, 16, float, long>", "searching and sorting"),
            ("void cudnn::fusion::convert_dq_to_16bits<true>", "attention"),
            ("at::cuda::philox::unpack_cudnn(at::PhiloxCudaState, long*, long*)", "attention"),
            ("void at::native::(anonymous namespace)::compute_grad_weight<float, long>", "embedding"),
            ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
            ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "copies and casts"),
            ("Memcpy DtoD (Device -> Device)", "copies and casts"),
            ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "other elementwise"),
            ("aten::bernoulli_", "chance"), ("aten::addmm", "products"),
            ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
            ("norm_backward", "residual sum, dropout, norm"), ("relu_dropout_backward", "ReLU, dropout, bias"),
            ("decode_attend", "decode_attend"), ("something new", "the rest"),
        ],
    )  # fmt: skip
    def test_kernels_are_known_by_what_they_are_for(self, kernel, part):
        assert profile.part_of(kernel) == part

    @pytest.mark.parametrize(("count", "wide", "high"), [(1, 1, 1), (4, 4, 1), (5, 3, 2), (8, 4, 2)])
    def test_panels_stand_in_rows(self, count, wide, high, tmp_path, monkeypatch):
        """At most four in each, all of them drawn, and no empty ones left."""
        drawn = []
        monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
        panels = {f"panel {number}": [("a", 1.0, True), ("b", None, False)] for number in range(count)}
        rows.write_bars_figure(tmp_path / "x.png", panels, label="ms", title="t", note="n")
        axes = drawn[0].axes
        assert [one.get_title() for one in axes] == list(panels)
        assert {one.get_subplotspec().get_gridspec().get_geometry() for one in axes} == {(high, wide)}
        named = [bool(one.get_yticklabels()[0].get_text()) for one in axes]
        assert named == [number % wide == 0 for number in range(count)]  # the first of each row

    def test_the_command_tells_where_all_the_time_goes(self, tmp_path):
        done = invoke("bench", "profile", "--quick", "--device", "cpu", "--output", tmp_path)
        assert done.exit_code == 0, done.output
        (path,) = tmp_path.glob("profile-quick_*.json")
        written = json.loads(path.read_text())
        assert [row["measure"] for row in written["rows"]] == ["train", "greedy", "beam"]
        for row in written["rows"]:
            parts = {line["part"]: line for line in profile.parts(row)}
            assert sum(line["ms"] for line in parts.values()) == pytest.approx(row["whole_ms"])
            assert parts["products"]["launches"] > 20
            assert parts["attention"]["ms"] > 0
            assert sum(line["share"] for line in parts.values()) == pytest.approx(1.0)
        assert "optimizer" in {line["part"] for line in profile.parts(written["rows"][0])}
        assert "## tiny-pyramidion, training step, batch 1, dropout of the paper" in done.stdout
        assert "| products |" in done.stdout
        assert path.with_name(f"{path.stem}_write.png").stat().st_size > 10_000

    def test_dropout_is_the_papers_or_the_peers(self, monkeypatch):
        seen = []
        monkeypatch.setattr(models.Bench, "train", lambda self, *_, **__: seen.append(self.candidate.config) or {})
        settings = quick(profile, measures=("train",), dropouts=profile.DROPOUTS, models=("tiny-pyramidion", "led"))
        found = profile.cases(settings)
        for case in found:
            profile.measure_case(case, settings)
        assert [(case["model"], case["dropout"]) for case in found] == [
            ("tiny-pyramidion", "paper"), ("tiny-pyramidion", "peers"), ("led", "peers"),
        ]  # fmt: skip
        assert [config.attention_dropout for config in seen] == [0.1, 0.0, 0.0]

    def test_long_names_do_not_break_a_table(self):
        assert profile.short("a|b`c") == "a/b'c"
        assert len(profile.short("x" * 500)) == 72


SHARED = {"repeats": (4, 4), "budget": (5, 5.0), "limit-seconds": (6, 6.0)}
CHOSEN = {"models": ("led,bart", ("led", "bart")), "batches": ("3,4", (3, 4)), "dtype": ("bfloat16", "bfloat16")}
COMMANDS = {
    "models": {
        **CHOSEN,
        **{"lengths": ("128,256", (128, 256)), "measures": ("train", ("train",)), "target": (7, 7), "tokens": (9, 9)},
        "compile": (None, True),
    },
    "table": {
        **{"presets": ("row-1", ("row-1",)), "parts": ("depth", ("depth",)), "dtypes": ("tf32", ("tf32",))},
        **{"depths": ("3,5", (3, 5)), "train-batch": (7, 7), "write-batch": (9, 9), "tokens": ("5", (5,))},
        "compile": (None, True),
    },
    "length": {
        **{"models": ("full", ("full",)), "shortest": (128, 128), "most": (512, 512), "target": (7, 7)},
        **{"dtype": ("tf32", "tf32"), "recompute": (None, True), "longest": (None, True)},
    },
    "generate": {**CHOSEN, "length": (128, 128), "tokens": (9, 9), "beams": ("3", (3,)), "writers": ("engine",) * 2},
    "profile": {
        **{"models": ("led,bart", ("led", "bart")), "length": (128, 128), "measures": ("beam", ("beam",))},
        **{"target": (7, 7), "tokens": (9, 9), "train-batches": ("3,4", (3, 4)), "write-batches": ("5", (5,))},
        **{"dropouts": ("peers", ("peers",)), "dtype": ("bfloat16", "bfloat16")},
    },
}
FIELDS = {"limit-seconds": "limit", "length": "n"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_arrives(command, monkeypatch, tmp_path):
    page = {"models": models, "table": table, "length": length, "generate": generate, "profile": profile}[command]
    options = COMMANDS[command] | SHARED
    seen = []
    monkeypatch.setattr(page, "run", lambda settings, *_: seen.append(settings))
    monkeypatch.setattr(rows, "publish", lambda *_: [tmp_path / "page.md"])
    (tmp_path / "page.md").write_text("")
    given = [part for name, (text, _) in options.items() for part in (f"--{name}", text) if part is not None]
    done = invoke("bench", command, *given, "--device", "cpu", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    (settings,) = seen
    for name, (_, value) in options.items():
        field = "forms" if (command, name) == ("length", "models") else FIELDS.get(name, name.replace("-", "_"))
        wanted = ("engine",) if name == "writers" else value
        assert getattr(settings, field) == wanted, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models", "--models", "led,gpt"], "`models` must be among small-pyramidion, small-blockwise, led, "),
        (["models", "--models", "led,gpt"], "got gpt."),
        (["models", "--lengths", "8k"], "`--lengths` must be whole numbers separated by commas, got '8k'."),
        (["models", "--batches", "1,0"], "`batches` must be at least 1, got 0."),
        (["models", "--measures", "dream"], "`measures` must be among train, encode, greedy, beam, got dream."),
        (["models", "--dtype", "int8"], "`dtype` must be among float32, tf32, bfloat16, got int8."),
        (["models", "--budget", "-1"], "`budget` must be a positive number of seconds, got -1."),
        (
            ["table", "--presets", "row-99"],
            "`name` must be one of those that `pyramidion presets` lists, got 'row-99'.",
        ),
        (["table", "--parts", ","], "`parts` must be among rows, depth, got none."),
        (["table", "--limit-seconds", "0"], "`limit` must be a positive number of seconds, got 0."),
        (["table", "--depths", "1"], "`depths` must be at least 2, got 1."),
        (["length", "--most", "100"], "`most` must be at least 512, got 100."),
        (["length", "--models", "led"], "`models` must be among pyramidion, blockwise, full, got led."),
        (["length", "--device", "tpu"], "`device` must be auto, cpu or cuda, got 'tpu'."),
        (["generate", "--beams", "0"], "`beams` must be at least 1, got 0."),
        (["generate", "--writers", "monk"], "`writers` must be among engine, transformers, got monk."),
        (["profile", "--dropouts", "none"], "`dropouts` must be among paper, peers, got none."),
        (["generate", "--output", __file__], "`--output` must be a folder, got the file"),
        (["draw", __file__], "`FILE` must be a result of bench models, table, length, generate or profile, got"),
    ],
)
def test_bad_options_get_one_line(arguments, message):
    done = invoke("bench", *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("pyramidion: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
