"""What the processes of a worker have in memory while they load a model: their slices, and hardly more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared.model.checkpoints import write_random_checkpoint
from tests.unit.collectives.in_threads import needs_library

pytestmark = needs_library

MEASURED = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from shared.collectives.one_host import join, shared_memories
from shared.collectives.rank_links import Ways
from shared.kernels.cpu.build import choose
from shared.kernels.cpu.library import load
from shared.kernels.backends.registry import choose_kernels
from shared.model.families.registry import load_config
from shared.model.decoder import Decoder
from shared.model.weights.loader import ask_for_huge_pages
from shared.model.layers.parameters import DecoderParameters
from shared.model.ranks.rank_decoder import RankDecoder
from shared.model.ranks.shard import Degrees, Shard

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

def slice_bytes(folder, rank):
    shard = Shard(load_config(folder), degrees, rank)
    config = shard.local_config
    views = DecoderParameters.allocate(config, torch.bfloat16, "meta", shard.experts).checkpoint_views(config)
    return sum(view.nbytes for view in views.values())

def load_all(folder):
    if degrees.num_ranks == 1:
        return [Decoder.load(folder, torch.bfloat16, "cpu")]
    descriptors = shared_memories(library, Ways(degrees.tensor, 1))

    def load_rank(rank):
        links = join(library, descriptors, rank, Ways(degrees.tensor, 1))
        return RankDecoder.load_rank(folder, torch.bfloat16, "auto", degrees, links)

    return list(ranks.map(load_rank, range(degrees.num_ranks)))

ask_for_huge_pages()
small, folder = map(Path, sys.argv[1:3])
degrees = Degrees(int(sys.argv[3]), expert=int(sys.argv[4]))
choose_kernels("cpu", torch.bfloat16)
library = load(choose()[1])
ranks = ThreadPoolExecutor(degrees.num_ranks)
kept = load_all(small)  # what the first load alone takes: threads, their heaps, code
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
loaded = load_all(folder)
print(resident("VmHWM") - before, sum(slice_bytes(folder, rank) for rank in range(degrees.num_ranks)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tensor", "expert"),
    [
        ("LlamaForCausalLM", 1, 1),
        ("LlamaForCausalLM", 2, 1),
        ("MixtralForCausalLM", 2, 1),
        ("MixtralForCausalLM", 2, 2),
    ],
)
def test_loading_takes_hardly_more_than_what_is_loaded(tmp_path: Path, family: str, tensor: int, expert: int) -> None:
    """Read, laid out for the kernels and packed; with two ranks both of them in one process. What any first load takes,
    of a model of any size, is no part of it."""
    write(tmp_path / "small", family, num_layers=1, num_heads=4, hidden_size=64, vocab_size=128)
    write(tmp_path / "model", family, num_layers=8, num_heads=16, hidden_size=1024, vocab_size=8000)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "small"), str(tmp_path / "model"), str(tensor), str(expert)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    peak, own = map(int, done.stdout.split())
    assert peak <= 1.06 * own


def write(folder: Path, family: str, **sizes: int) -> None:
    is_llama = family == "LlamaForCausalLM"
    write_random_checkpoint(
        folder, family, num_kv_heads=4, head_dim=64, tie=False, dtype=torch.bfloat16,
        intermediate_size=2816 if is_llama else 704,
        extra_config=None if is_llama else {"num_local_experts": 4, "num_experts_per_tok": 2}, **sizes,
    )  # fmt: skip
