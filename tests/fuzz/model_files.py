"""Damaged headers of safetensors and GGUF files: `python -m tests.fuzz.model_files --cases 100000 --out file`.

Each case is a small valid file that was changed at random: bytes, lengths, or what its JSON says. Whoever brings a
model file must not be able to raise anything but ModelLoadError.
"""

from __future__ import annotations

import json
import random
import struct
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from loadtest.rig.command_line import Option, run
from loadtest.rig.results import write_json
from shared.errors import ModelLoadError
from shared.model.checkpoints import write_random_checkpoint
from shared.model.gguf.description import config_of
from shared.model.gguf.header import read_gguf
from shared.model.gguf.vocabulary import tokenizer_of
from shared.model.weights.safetensors_files import STORED, read_header
from tests.gguf_files import write_model

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, float("inf"), float("nan"), "", "F32", "\ud800",
    [], {}, [[]], [0, 0], [-1, 1], [2**64] * 4, {"dtype": "F32"},
)  # fmt: skip
"""What may stand anywhere in a header."""


def valid_files(folder: Path) -> tuple[bytes, bytes]:
    """The beginnings of a safetensors and of a GGUF file."""
    source = folder / "source"
    write_random_checkpoint(source, hidden_size=32, intermediate_size=32, num_heads=2, head_dim=16, num_layers=1)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.bos_token_id": 0,
    }
    write_model(source, ("Q8_0",), folder / "small.gguf", folder / "opened", **metadata)
    return (source / "model.safetensors").read_bytes(), (folder / "small.gguf").read_bytes()


def damaged_bytes(content: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """Up to eight changes of bytes and lengths, most of them in the header."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(min(len(data), header_bytes) or 1)
        match rng.randrange(6):
            case 0:
                data[place : place + 1] = rng.randbytes(1)
            case 1:
                data[place : place + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1)))
            case 2:
                data[place : place + 4] = struct.pack("<I", rng.randrange(64))
            case 3:
                del data[place : place + rng.randint(1, 64)]
            case 4:
                data[place:place] = data[place : place + rng.randint(1, 64)]
            case _:
                data = data[: rng.randrange(len(data) + 1)] or bytearray(1)
    return bytes(data)


def damaged_json(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header is JSON still, most often, and says something else."""
    length = int.from_bytes(content[:8], "little")
    fields = json.loads(content[8 : 8 + length])
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(fields) or [""])
        entry = fields.get(name)
        value = rng.choice(VALUES)
        match rng.randrange(5):
            case 0:
                fields[name] = value
            case 1 if isinstance(entry, dict):
                entry[rng.choice(("dtype", "shape", "data_offsets"))] = value
            case 2 if isinstance(entry, dict):
                key = rng.choice(("shape", "data_offsets"))
                if isinstance(entry.get(key), list):
                    entry[key] = [rng.choice((value, item)) for item in entry[key]] + [value] * rng.randrange(2)
            case 3 if isinstance(entry, dict):
                entry["dtype"] = rng.choice((*STORED, "F4", "I128"))
            case _:
                fields[rng.choice(("", "__metadata__", name * 2))] = entry
    header = json.dumps(fields).encode("utf-8", "surrogatepass")
    if rng.randrange(50) == 0:
        header = b"[" * 100_000 if rng.randrange(2) else b'{"a":' * 50_000
    if rng.randrange(4) == 0:
        header = damaged_bytes(header, len(header), rng)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def read_safetensors(path: Path) -> None:
    """As a worker does."""
    read_header(path)


def read_whole_gguf(path: Path) -> None:
    """What becomes a model folder, too."""
    header = read_gguf(path)
    config_of(header)
    tokenizer_of(header)


def fuzz_files(num_cases: int, folder: Path, seed: int = 1) -> tuple[Counter[str], list[str]]:
    """What came back, by the kind of file, and each case that raised what it should not."""
    rng = random.Random(seed)
    safetensors, gguf = valid_files(folder)
    header_bytes = 8 + int.from_bytes(safetensors[:8], "little"), len(read_gguf(folder / "small.gguf").raw)
    kinds: list[tuple[str, Callable[[], bytes], Callable[[Path], None]]] = [
        ("safetensors bytes", lambda: damaged_bytes(safetensors, header_bytes[0], rng), read_safetensors),
        ("safetensors JSON", lambda: damaged_json(safetensors, rng), read_safetensors),
        ("GGUF bytes", lambda: damaged_bytes(gguf, header_bytes[1], rng), read_whole_gguf),
    ]
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    path = folder / "case"
    for number in range(num_cases):
        name, make, read = kinds[number % len(kinds)]
        path.write_bytes(make())
        try:
            read(path)
        except ModelLoadError:
            outcomes[f"{name}: refused"] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcomes[f"{name}: {type(error).__name__}"] += 1
            failures.append(f"{name}, case {number} of seed {seed}: {traceback.format_exc(limit=-3)}")
        else:
            outcomes[f"{name}: read"] += 1
    return outcomes, failures


def main(
    cases: Annotated[int, Option("files in all")] = 100_000,
    seed: Annotated[int, Option("of the random changes")] = 1,
    out: Annotated[Path | None, Option("a JSON file with what came back")] = None,
) -> int:
    """Read damaged model files."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tandem-fuzz-") as folder:
        outcomes, failures = fuzz_files(cases, Path(folder), seed)
    print(f"{cases} files in {time.monotonic() - begun:.0f} s: {dict(sorted(outcomes.items()))}")
    for failure in failures[:20]:
        print("FAILURE", failure)
    print(f"{len(failures)} failures")
    if out is not None:
        write_json(
            out, {"cases": cases, "seed": seed, "outcomes": dict(sorted(outcomes.items())), "failures": failures}
        )
    return 1 if failures else 0


if __name__ == "__main__":
    run(main, name="python -m tests.fuzz.model_files")
