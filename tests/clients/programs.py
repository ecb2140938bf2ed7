"""Benchmarks, harnesses and examples that are programs, each as its own documentation says to call it, all offline."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

URL, GRPC = os.environ["TANDEM_CLIENTS_URL"], os.environ["TANDEM_CLIENTS_GRPC"]
CLIENTS = Path(os.environ["TANDEM_CLIENTS_FOLDER"])
ROOT = Path(__file__).parents[2]
MODEL = "demo"
FOLDER = ROOT / "models" / "demo"
EXAMPLES = ROOT / "docs" / "examples"
DEADLINE_S = 600
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - metric: acc
"""
QUESTIONS = [
    {"query": "In the beginning God created the heaven and the", "choices": ["earth", "bicycle"], "gold": 0},
    {"query": "And God said, Let there be", "choices": ["noodles", "light"], "gold": 1},
    {"query": "And the LORD spake unto", "choices": ["Moses", "robots"], "gold": 0},
]


def run(folder: Path, *arguments: list[str], told: Mapping[str, str] = OFFLINE) -> str:
    """What a program wrote to stdout; it must end with status 0."""
    path = os.pathsep.join([str(CLIENTS / "sdks" / "bin"), os.environ["PATH"]])
    done = subprocess.run(
        [part for parts in arguments for part in parts],
        cwd=folder,
        env={**os.environ, **told, "HF_HOME": str(folder / "hf"), "PATH": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def program(venv: str, name: str) -> str:
    return str(CLIENTS / venv / "bin" / name)


def test_lm_evaluation_harness_scores_choices_by_their_loglikelihood(tmp_path: Path) -> None:
    """Its tokenizer is the server's: nothing is read from the model's folder."""
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    tasks.mkdir()
    (tasks / "verses.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tasks / "verses.yaml").write_text(TASK.format(name="verses", data=tasks / "verses.jsonl"))
    given = f"model={MODEL},base_url={URL}/v1/completions,num_concurrent=2,tokenizer_backend=remote"
    run(
        tmp_path,
        [program("lm-eval", "lm_eval"), "run", "--model", "local-completions", "--model_args", given],
        ["--tasks", "verses", "--include_path", str(tasks), "--output_path", str(out)],
    )
    (path,) = out.rglob("results_*.json")
    found = json.loads(path.read_text())
    assert found["results"]["verses"]["acc,none"] == 1.0
    assert found["n-samples"]["verses"]["effective"] == len(QUESTIONS)


def test_guidellm_benchmarks_with_its_own_defaults(tmp_path: Path) -> None:
    run(
        tmp_path,
        [program("guidellm", "guidellm"), "run", "--backend", f"kind=openai_http,target={URL}"],
        ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"],
        ["--tokenizer", f"kind=huggingface_auto,model={FOLDER}", "--disable-progress"],
        ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"],
    )
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)


def test_aiperf_benchmarks_with_its_own_defaults(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(
        tmp_path,
        [program("aiperf", "aiperf"), "profile", "-m", MODEL, "--url", URL, "--tokenizer", str(FOLDER), "--streaming"],
        ["--request-count", "8", "--ui", "none", "--artifact-dir", str(out)],
        told={},  # told to be offline, it takes no folder for a tokenizer
    )
    with (out / "profile_export_aiperf.csv").open() as file:
        figures = {row[0]: row[1] for row in csv.reader(file) if len(row) > 1}
    assert float(figures["Request Count"]) == 8
    assert float(figures.get("Error Request Count") or 0) == 0


def test_the_python_example_runs(tmp_path: Path) -> None:
    streamed, parsed = run(tmp_path, [sys.executable, str(EXAMPLES / "chat.py"), URL]).strip().rsplit("\n", 1)
    assert streamed
    assert parsed.startswith("Thing(name=")


def test_the_grpcurl_example_runs(tmp_path: Path) -> None:
    out = run(tmp_path, ["sh", str(EXAMPLES / "grpcurl.sh"), GRPC])
    assert "tandem.v1.InferenceService.Generate\n" in out
    assert '"finish_reason": "FINISH_REASON_LENGTH"' in out
    assert '"max_model_len"' in out


@pytest.mark.parametrize(("example", "address"), [("openai.mjs", URL), ("grpc.mjs", GRPC)])
def test_the_node_examples_run(tmp_path: Path, example: str, address: str) -> None:
    """As they stand, beside the packages that their package.json names."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    folder = tmp_path / "docs" / "examples"
    shutil.copytree(EXAMPLES, folder)
    (folder / "node_modules").symlink_to(CLIENTS / "node" / "node_modules")
    (tmp_path / "proto").symlink_to(ROOT / "proto")
    out = run(folder, ["node", "--preserve-symlinks", example, address])
    assert (
        ("'boat'" in out or "'tower'" in out) if example == "openai.mjs" else "FINISH_REASON_LENGTH, 16 tokens" in out
    )
