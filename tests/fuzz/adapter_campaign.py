"""Damaged adapter folders and random admin calls: each is carried out or refused by type, and opens nothing outside."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.model.adapters.adapter import WEIGHTS_FILE
from shared.model.adapters.random_adapter import write_random_adapter
from shared.model.config.folder import ADAPTER_FILE
from shared.model.families.registry import load_config
from tests.fuzz.campaign import Edge, Findings
from tests.fuzz.model_files import VALUES, damaged_bytes, damaged_json
from tests.waiting import DEADLINE_S

FIELDS = (
    "r", "lora_alpha", "target_modules", "peft_type", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias",
    "modules_to_save", "target_parameters", "init_lora_weights", "layers_to_transform",
)  # fmt: skip
NAMES = ("fuzz-1", "fuzz-2", "fuzz-3", "a b", "", "\n", "x" * 300, "demo", "é", "\ud800", 1, None)
PARTS = ("case", "secret", "out", "case-out", "loop", "..", ".", "", "\0", "x" * 300, "~", "\ud800", "a\n")
_IN_OPEN, _IN_NONBLOCK = 0x20, 0o4000


@contextmanager
def opened(folder: Path) -> Iterator[list[bytes]]:
    """What any process opens in a folder meanwhile, filled in at the end: inotify's records, with the files' names."""
    library, found = ctypes.CDLL(None, use_errno=True), list[bytes]()
    watch = library.inotify_init1(_IN_NONBLOCK)
    if watch < 0 or library.inotify_add_watch(watch, os.fsencode(folder), _IN_OPEN) < 0:
        raise OSError(ctypes.get_errno(), f"{folder} cannot be watched")
    try:
        yield found
    finally:
        try:
            while data := os.read(watch, 1 << 16):
                found.append(data)
        except BlockingIOError:
            pass
        os.close(watch)


class AdapterFolders:
    """A folder that workers may read, in which one adapter is damaged anew for each case, and a secret beside it."""

    def __init__(self, allowed: Path, model: Path) -> None:
        self.secret = allowed.parent / "secret"
        self._case = allowed / "case"
        self._allowed = allowed
        config = load_config(model)
        for folder in (self._case, self.secret):
            write_random_adapter(folder, config, rank=2, targets=["q_proj", "down_proj"])
        (allowed / "out").symlink_to(self.secret)
        (allowed / "loop").symlink_to("loop")
        (allowed / "case-out").mkdir()
        for name in (ADAPTER_FILE, WEIGHTS_FILE):
            (allowed / "case-out" / name).symlink_to(self.secret / name)
        self._files = {name: (self._case / name).read_bytes() for name in (ADAPTER_FILE, WEIGHTS_FILE)}

    def damage(self, rng: random.Random) -> Path:
        """The folder, one of its files changed."""
        config, weights = self._files[ADAPTER_FILE], self._files[WEIGHTS_FILE]
        match rng.randrange(5):
            case 0:
                config = damaged_bytes(config, len(config), rng)
            case 1 | 2:
                fields = {**json.loads(config), rng.choice(FIELDS): rng.choice((*VALUES, {"q_proj": 2}, ["q_proj"]))}
                config = json.dumps(fields).encode("utf-8", "surrogatepass")
            case 3:
                weights = damaged_bytes(weights, 8 + int.from_bytes(weights[:8], "little"), rng)
            case _:
                weights = damaged_json(weights, rng)
        (self._case / ADAPTER_FILE).write_bytes(config)
        (self._case / WEIGHTS_FILE).write_bytes(weights)
        return self._case

    def path(self, rng: random.Random) -> str:
        """Of what may be there, inside or outside."""
        begin = rng.choice((str(self._allowed), str(self._allowed), str(self._allowed.parent), "", "/"))
        return rng.choice(("/", "//", "/./")).join([begin, *rng.choices(PARTS, k=rng.randint(0, 4))])


def fuzz_adapters(edge: Edge, allowed: Path, model: Path, num_cases: int, found: Findings) -> None:
    """Loads and unloads at a cluster whose workers may read adapters in `allowed`. A status from 500 on is a failure,
    and so is an open file outside. No name is left."""
    folders, rng = AdapterFolders(allowed, model), random.Random(num_cases)
    host, _, port = edge.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)

    def call(path: str, body: Any) -> int:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        raw = answer.read()
        if answer.status >= 500 or (answer.status >= 400 and "error" not in json.loads(raw)):
            found.failed((path, body), raw)
        found.outcomes[f"{path.removeprefix('/v1/')} {answer.status}"] += 1
        return answer.status

    with opened(folders.secret) as records:
        for _ in range(num_cases):
            name = rng.choice(NAMES)
            match rng.randrange(4):
                case 0 | 1:
                    call("/v1/load_lora_adapter", {"lora_name": "fuzz-1", "lora_path": str(folders.damage(rng))})
                case 2:
                    body: dict[str, Any] = {"lora_name": name, "lora_path": folders.path(rng)}
                    if not rng.randrange(5):
                        body[rng.choice(("lora_name", "lora_path", "model", "more"))] = rng.choice(VALUES)
                    call("/v1/load_lora_adapter", body)
                case _:
                    call("/v1/unload_lora_adapter", {"lora_name": name})
        for name in NAMES[:3]:
            call("/v1/unload_lora_adapter", {"lora_name": name})
    connection.close()
    if records:
        found.failed("the adapters' calls", f"a file of {folders.secret} was opened: {records[0]!r}")
