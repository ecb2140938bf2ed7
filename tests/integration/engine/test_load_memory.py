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
from shared.kernels.cpu.launch import load
from shared.kernels.registry import choose_kernels
from shared.model.config import ModelConfig
from shared.model.decoder import Decoder
from shared.model.huge_pages import ask_for_huge_pages
from shared.model.parameters import DecoderParameters
from shared.model.rank_decoder import RankDecoder
from shared.model.shard import Degrees, Shard

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

def slice_bytes(rank):
    shard = Shard(ModelConfig.load(folder), degrees, rank)
    config = shard.local_config
    views = DecoderParameters.allocate(config, torch.bfloat16, "meta", shard.experts).checkpoint_views(config)
    return sum(view.nbytes for view in views.values())

def load_rank(rank):
    links = join(library, descriptors, rank, Ways(degrees.tensor, 1))
    return RankDecoder.load_rank(folder, torch.bfloat16, "auto", degrees, links)

ask_for_huge_pages()
folder, degrees = Path(sys.argv[1]), Degrees(int(sys.argv[2]), expert=int(sys.argv[3]))
choose_kernels("cpu", torch.bfloat16)
library = load(choose()[1])
descriptors = shared_memories(library, Ways(degrees.tensor, 1))
torch.zeros(1 << 20).add_(1)  # starts torch's threads
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
if degrees.num_ranks == 1:
    loaded = [Decoder.load(folder, torch.bfloat16, "cpu")]
else:
    with ThreadPoolExecutor(degrees.num_ranks) as ranks:
        loaded = list(ranks.map(load_rank, range(degrees.num_ranks)))
print(resident("VmHWM") - before, sum(map(slice_bytes, range(degrees.num_ranks))))
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
def test_loading_takes_a_tenth_more_than_what_is_loaded(tmp_path: Path, family: str, tensor: int, expert: int) -> None:
    """Read, laid out for the kernels and packed; with two ranks both of them in one process."""
    is_llama = family == "LlamaForCausalLM"
    write_random_checkpoint(
        tmp_path, family, num_layers=8, num_heads=16, num_kv_heads=4, head_dim=64, hidden_size=1024,
        intermediate_size=2816 if is_llama else 704, vocab_size=8000, tie=False, dtype=torch.bfloat16,
        extra_config=None if is_llama else {"num_local_experts": 4, "num_experts_per_tok": 2},
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), str(tensor), str(expert)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    peak, own = map(int, done.stdout.split())
    assert peak <= 1.1 * own
