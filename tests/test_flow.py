"""From files to summaries, as a user goes: prepare, train, evaluate, summarize, on genuine arXiv and PubMed records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pyramidion import cli

SAMPLES = Path(__file__).resolve().parents[2] / "shared" / "data" / "cohan_samples"


def invoke(*arguments: object) -> Any:
    done = CliRunner().invoke(cli.main, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.slow
@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the twelve records are not here")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_twelve_genuine_records_from_end_to_end(tmp_path: Path):
    store, run, scores = tmp_path / "store", tmp_path / "run", tmp_path / "scores"
    told = invoke("prepare", SAMPLES, "--output", store, "--vocab-size", 2000).output
    assert "No duplicates, no bad lines." in told
    short = ["--set", "generation={num_beams: 1, max_new_tokens: 8, min_new_tokens: 0}", "--set", "max_source=600"]
    steps = ["--set", "batch_size=4", "--max-steps", 3, "--device", "cpu"]
    invoke("train", "--preset", "tiny-pyramidion", "--data", store, "--output", run, *steps, *short)
    search = ["--num-beams", 1, "--max-new-tokens", 8]
    model = run / "model"
    invoke("evaluate", "--model", model, "--data", store, "--split", "test", "--output", scores, *search)
    found = json.loads((scores / "scores.json").read_text())
    assert "rouge1" in json.dumps(found)
    document = tmp_path / "paper.txt"
    document.write_text("A paper about nothing in particular. " * 30)
    written = invoke("summarize", document, "--model", model, "--format", "jsonl", *search)
    (line,) = [json.loads(text) for text in written.stdout.splitlines()]
    assert line["error"] is None
    assert line["document_tokens"] > 100
