"""The stopwatch tells the truth, and a benchmark leaves nothing out."""

import json
import math
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from pyramidion import cli
from pyramidion.bench import measure, padding, report
from pyramidion.bench import topk as bench
from pyramidion.topk import soft_topk

MEBIBYTE = 1 << 20


def invoke(*arguments):
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


class Clock:
    """A clock that moves only when told, so that a busy machine cannot fail a test."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(measure, "perf_counter", lambda: self.now)

    def work(self, *seconds):
        """Return a function that takes the given times, call after call, and then always the last."""
        remaining = list(seconds)

        def fn():
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return fn


class TestMeasure:
    def test_time_is_that_of_one_call_after_the_warm_up(self, monkeypatch):
        fn = Clock(monkeypatch).work(90, 90, 1, 5, 2, 4, 3)
        timing = measure.timeit(fn, device="cpu", repeats=5, warmup=2)
        assert (timing.lower, timing.median, timing.upper, timing.count, timing.host) == (2, 3, 4, 5, 3)

    def test_repeats_until_enough_was_measured(self, monkeypatch):
        clock = Clock(monkeypatch)
        assert measure.timeit(clock.work(0.25), device="cpu", min_time=2).count == 8
        assert measure.timeit(clock.work(4), device="cpu", min_time=2).count == 3
        assert measure.timeit(clock.work(1), device="cpu", min_time=60, max_time=5).count == 5
        assert measure.timeit(clock.work(1e-6), device="cpu").count == 100
        with pytest.raises(ValueError, match=r"`repeats` must be at least 1, got 0\."):
            measure.timeit(lambda: None, device="cpu", repeats=0)

    def test_the_clock_is_in_seconds(self):
        assert 0.01 <= measure.timeit(lambda: time.sleep(0.01), device="cpu", repeats=3).median < 1

    def test_a_race_takes_turns(self):
        calls = []
        found = measure.race({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, device="cpu", repeats=2)
        assert calls == ["a", "b"] * 3
        assert {name: timing.count for name, timing in found.items()} == {"a": 2, "b": 2}

    def test_memory_sees_a_temporary_and_what_is_kept(self):
        def fn():
            temporary = torch.empty(3 * MEBIBYTE, dtype=torch.int8)
            other = torch.empty(5 * MEBIBYTE, dtype=torch.int8)
            del temporary, other
            return torch.empty(2 * MEBIBYTE, dtype=torch.int8)

        assert measure.peak_extra_memory(fn, device="cpu") == 8 * MEBIBYTE
        assert measure.peak_extra_memory(lambda: None, device="cpu") == 0

    def test_memory_sees_inside_kernels(self):
        scores = torch.rand(1, MEBIBYTE)
        values_and_indices = MEBIBYTE * (4 + 8)
        assert measure.peak_extra_memory(lambda: scores.sort(dim=1), device="cpu") >= values_and_indices

    def test_machine_says_what_and_not_where(self, monkeypatch):
        found = measure.machine("cpu")
        assert found["device"].startswith("CPU, ")
        assert found["torch"] == torch.__version__
        assert "/" not in "".join(str(value) for value in found.values())
        monkeypatch.setattr(measure, "_git", lambda *_: None)
        monkeypatch.setenv("PYRAMIDION_COMMIT", "abc")
        assert measure.machine("cpu")["commit"] == "abc"
        monkeypatch.delenv("PYRAMIDION_COMMIT")
        assert measure.machine("cpu")["commit"] == "unknown"

    def test_bandwidth_counts_reads_and_writes(self, monkeypatch):
        monkeypatch.setattr(measure, "timeit", lambda fn, **_: measure.Timing(0.5, 0.5, 0.5, 1, 0.5))
        assert measure.copy_bandwidth("cpu", size=100) == 400


class TestFigures:
    def test_nccs_is_its_definition(self):
        b, k, d = 2, 5, 3
        true, chosen = torch.randn(b, k, d), torch.randn(b, k, d)
        total = 0.0
        for row in range(b):
            for i in range(k):
                total += max(torch.cosine_similarity(true[row, i], chosen[row, j], 0).item() for j in range(k)) / k
        for chunk_bytes in (1, 1 << 20):
            assert bench.nccs(true, chosen, chunk_bytes=chunk_bytes) == pytest.approx(total / b, abs=1e-6)
        assert bench.nccs(true, true.flip(1)) == pytest.approx(1, abs=1e-6)

    def test_gradient_reach_counts_real_tokens(self):
        grad = torch.tensor([[1.0, 0.0, 3.0, 9.0], [0.0, 0.0, 0.0, 0.0]])
        mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
        share, variance = bench.gradient_reach(grad, mask)
        assert share == pytest.approx((2 / 3 + 0) / 2)
        assert variance == pytest.approx(torch.tensor([1.0, 0.0, 3.0]).var(correction=0).item() / 2)

    @pytest.mark.parametrize(("n", "k"), [(64, 64), (64, 32), (96, 3), (128, 1)])
    def test_vector_rounds_is_the_operator(self, n, k):
        scores, x = torch.rand(2, n, dtype=torch.float64), torch.randn(2, n, 7, dtype=torch.float64)
        by_rounds, by_scores = bench.vector_rounds(scores, x, k), soft_topk(scores, k).pool(x)
        order = [pooled[..., 0].argsort(dim=1)[..., None].expand_as(pooled) for pooled in (by_rounds, by_scores)]
        torch.testing.assert_close(by_rounds.gather(1, order[0]), by_scores.gather(1, order[1]), rtol=1e-12, atol=1e-12)

    def test_the_ablation_averages_over_sizes(self):
        def row(method, n, likeness):
            return bench.Row(method, n, 2, nccs=likeness)

        def race(n, forward):
            return {"n": n, "k": 2, "forward_ms": {"halving": forward, "halving-unsorted": 1.0}, "both_ms": {}}

        rows = [
            *(row("halving", 8, 0.9), row("halving-unsorted", 8, 0.8)),
            *(row("halving", 16, 0.9), row("halving-unsorted", 16, 0.6)),
            bench.Row("halving", 32, 2, skipped="out of memory"),
        ]
        (entry,) = bench.sorting_ablation(rows, [race(8, 1.1), race(16, 1.3)])
        assert entry["time_overhead_percent"] == pytest.approx(20)
        assert entry["error_reduction_percent"] == pytest.approx((50 + 75) / 2)
        assert entry["sizes"] == 2

    def test_limits_count_bytes(self):
        settings = bench.Settings(batch=3, width=5, dtype="bfloat16")
        (entry,) = bench.limits([bench.Row("halving", 7, 2, forward_ms=1.0, backward_ms=1.0)], settings, bandwidth=1e3)
        long, short = 3 * 7 * 5 * 2, 3 * 2 * 5 * 2
        assert entry["forward_limit_ms"] == pytest.approx(long + 3 * 7 * 4 + short)
        assert entry["backward_limit_ms"] == pytest.approx(2 * long + short)
        assert entry["forward_ratio"] == pytest.approx(1 / entry["forward_limit_ms"])

    def test_what_does_not_fit_says_why(self, monkeypatch):
        settings = bench.Settings(batch=1, width=4, budget=1e-6)
        inputs = bench.make_inputs(settings, 24, 8)
        row = bench.measure_method("softsort", inputs, settings)
        assert row.skipped is not None
        assert row.skipped.startswith("one call took")
        assert bench.measure_method("softsort", inputs, settings, [row]).skipped == "over budget at 24 → 8 already"
        assert bench.measure_method("vector-rounds", inputs, settings).skipped == "n / k must be a power of two"
        monkeypatch.setattr(measure, "free_memory", lambda device: 2**10)
        assert bench.measure_method("softsort", inputs, settings).skipped == "needs about 0.0 GiB, 0.0 GiB are free"


class TestReport:
    def test_names_and_numbers(self):
        assert (
            report.result_stem("topk", {"device": "NVIDIA H200", "date": "2026-11-15"}) == "topk_nvidia-h200_2026-11-15"
        )
        assert [report.three_digits(v) for v in (0, 0.0123, 1.0, 99.99, 1234.5)] == [
            "0",
            "0.0123",
            "1.00",
            "100",
            "1,234",
        ]
        assert [report.thousands(n) for n in (100, 1024, 131072, 1 << 21)] == ["100", "1k", "128k", "2M"]

    def test_a_skipped_row_shows_its_reason(self):
        columns = (report.Column("method", "method"), report.Column("ms", "ms", ".1f"), report.Column("n", "n"))
        rows = [{"method": "a", "ms": 1.25, "n": 3}, {"method": "b", "skipped": "too long"}]
        assert report.markdown_table(rows, columns).splitlines() == [
            "| method | ms | n |",
            "| --- | ---: | ---: |",
            "| a | 1.2 | 3 |",
            "| b | skipped: too long |  |",
        ]


class TestCommand:
    def test_a_small_run_leaves_nothing_out(self, tmp_path):
        done = invoke(
            "bench", "topk", "--quick", "--device", "cpu", "--sizes", "32:8,48:8", "--budget", 5, "--output", tmp_path
        )
        assert done.exit_code == 0, done.output
        (path,) = tmp_path.glob("topk_cpu-*.json")
        written = json.loads(path.read_text())
        assert next(iter(written)) == "machine"
        assert {(row["method"], row["n"]) for row in written["rows"]} == {
            (m, n) for m in bench.METHODS for n in (32, 48)
        }
        for row in written["rows"]:
            figures = [row[key] for key in ("forward_ms", "both_ms", "nccs", "gradient_share", "extra_memory")]
            assert row["skipped"] or all(math.isfinite(figure) for figure in figures)
        skipped = {row["method"]: row["skipped"] for row in written["rows"] if row["n"] == 48 and row["skipped"]}
        assert skipped["vector-rounds"] == "n / k must be a power of two"
        assert "halving" not in skipped
        assert [(entry["n"], entry["k"]) for entry in written["speedup_over_vector_rounds"]] == [(32, 8)]
        assert written["growth"]["n"] == [256, 512, 1024]
        assert [entry["method"] for entry in written["sorting_ablation"]] == ["halving", "halving-sharp"]

        text = path.with_suffix(".md").read_text()
        assert all(f"| {method} |" in text for method in bench.METHODS)
        for kind in ("time", "quality", "tradeoff"):
            picture = path.with_name(f"{path.stem}_{kind}.png")
            assert picture.name in text
            assert picture.name in done.output
            assert picture.read_bytes().startswith(b"\x89PNG")
            assert picture.stat().st_size > 10_000

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--sizes", "512:2048"], "`sizes` must be pairs n:k with 1 <= k < n, such as 8192:512, got '512:2048'."),
            (["--sizes", "512"], "`sizes` must be pairs n:k with 1 <= k < n, such as 8192:512, got '512'."),
            (["--methods", "halving,luck"], "got luck."),
            (["--batch", "0"], "`batch` must be at least 1, got 0."),
            (["--dtype", "int8"], "`dtype` must be one of float32, bfloat16, got int8."),
            (["--budget", "-1"], "`budget` must be a positive number of seconds, got -1."),
            (["--device", "tpu"], "`device` must be auto, cpu or cuda, got 'tpu'."),
            (["--output", __file__], "`--output` must be a folder, got the file"),
        ],
    )
    def test_bad_options_get_one_line(self, arguments, message):
        done = invoke("bench", "topk", *arguments)
        assert done.exit_code == 2
        assert done.stdout == ""
        assert done.stderr.startswith("pyramidion: ")
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1

    def test_version_and_help(self):
        from pyramidion import __version__

        assert invoke("--version").output.strip() == __version__
        assert "--sizes 8192:512" in " ".join(invoke("bench", "topk", "--help").output.split())

    def test_the_command_line_itself_loads_nothing_heavy(self):
        code = f"import runpy, sys; runpy.run_path({cli.__file__!r}); print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"


class TestPadding:
    def test_batches_hold_the_same_documents(self):
        settings = padding.default_settings("cpu", presets=("tiny-pyramidion",), batch=3, shortest=7, longest=31)
        assert padding.spread(settings) == [7, 19, 31]
        made = padding.batches(settings, 50)
        assert {name: (tuple(mask.shape), tokens) for name, (_, mask, tokens) in made.items()} == {
            "mixed": ((3, 31), 57),
            "cut": ((3, 7), 21),
            "equal": ((3, 19), 57),
            "unmarked": ((3, 31), 93),
        }
        for ids, mask, tokens in made.values():
            assert mask.sum() == tokens
            assert torch.equal(ids[mask], made["unmarked"][0][:, : ids.shape[1]][mask])

    def test_a_ratio_is_of_times_and_of_tokens(self, monkeypatch):
        clock = Clock(monkeypatch)

        def step(encoder, ids, mask, settings):
            clock.now += int(mask.sum()) if int(mask.sum()) != 57 else 2 * 57

        monkeypatch.setattr(padding, "_step", step)
        settings = padding.default_settings("cpu", presets=("tiny-pyramidion",), batch=3, shortest=7, longest=31)
        rows = {row["batch"]: row for row in padding.run(settings)["rows"]}
        assert {name: row["ratio"] for name, row in rows.items()} == pytest.approx(
            {"mixed": 2, "cut": 1, "equal": 2, "unmarked": 1}
        )
        assert rows["cut"]["ms"] == 21_000

    def test_a_small_run(self, tmp_path):
        options = ("--presets", "tiny-pyramidion", "--batch", 2, "--shortest", 40, "--longest", 90, "--repeats", 1)
        done = invoke("bench", "padding", "--device", "cpu", *options, "--output", tmp_path)
        assert done.exit_code == 0, done.output
        (path,) = tmp_path.glob("padding_cpu-*.json")
        written = json.loads(path.read_text())
        assert written["lengths"] == [40, 90]
        assert [row["batch"] for row in written["rows"]] == list(padding.BATCHES)
        assert all(row["ms"] > 0 for row in written["rows"])
        assert "| tiny-pyramidion | mixed | 130 |" in done.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--presets", "row-99"], "got 'row-99'"),
            (["--batch", "1"], "`batch` must be at least 2, got 1."),
            (["--longest", "100"], "`longest` must be at least 512, got 100."),
            (["--dtype", "int8"], "`dtype` must be one of float32, bfloat16, got 'int8'."),
            (["--device", "tpu"], "`device` must be auto, cpu or cuda, got 'tpu'."),
            (["--output", __file__], "`--output` must be a folder, got the file"),
        ],
    )
    def test_bad_options_get_one_line(self, arguments, message):
        done = invoke("bench", "padding", *arguments)
        assert done.exit_code == 2
        assert done.stderr.startswith("pyramidion: ")
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
