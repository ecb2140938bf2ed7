"""The library of C++ kernels, with the types of its functions' arguments."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch


def load(path: Path) -> ctypes.CDLL:
    """The library with its functions' argument types declared; its loops take as many threads as torch's."""
    library = ctypes.CDLL(str(path))
    library.tandem_ask_threads.argtypes = [c_void_p]
    library.tandem_ask_threads.restype = None
    library.tandem_ask_threads(ctypes.cast(num_threads_function(), c_void_p))
    p, n = c_void_p, c_int64
    library.tandem_pack_linear.argtypes = [p, n, n, c_int]
    library.tandem_plan_compression.argtypes = [p, n, n, p, p]
    library.tandem_compress.argtypes = [p, n, n, p, n, p]
    library.tandem_linear.argtypes = [p, p, n, n, p, p, p, n, n, n, c_int]
    library.tandem_experts.argtypes = [p, p, p, p, p, p, p, p, p, p, c_float, c_float, p, c_int]
    library.tandem_choose_experts.argtypes = [p, p, p, p, p, c_float, c_int]
    library.tandem_batched_linear.argtypes = [p, p, n, p, p, p, n, n, n, n, c_int]
    library.tandem_rms_norm.argtypes = [p, p, p, p, p, n, n, c_float, c_int, c_int]
    library.tandem_act_and_mul.argtypes = [p, p, n, n, c_int, c_float, c_float, c_int]
    library.tandem_rotate_and_write.argtypes = [p, p, p, p, p, p, p, p, p, p, c_float, p, p, c_int]
    library.tandem_rotate_and_write_latent.argtypes = [p, p, p, p, p, p, p, p, c_float, p, p, c_int, c_int]
    library.tandem_paged_attention.argtypes = [p, p, p, p, p, p, c_float, c_float, p, p, c_int]
    library.tandem_delta_attention.argtypes = [p, p, c_float, c_int]
    library.tandem_mask_tokens.argtypes = [p, p, p, n, n, n]
    library.tandem_penalize.argtypes = [p, p, p, p, p, p, p, n, n, n]
    library.tandem_count_tokens.argtypes = [p, p, p, p, n, n, n]
    library.tandem_greedy_tokens.argtypes = [p, p, p, p, n, n, n, n]
    library.tandem_sample_tokens.argtypes = [p, p, p, p, p, p, p, p, n, n]
    library.tandem_add_lora.argtypes = [p, p, p, p, p, p, c_int]
    library.tandem_layers.argtypes = [p, p, p, p, p, c_float, c_float, c_float, p]
    for name in (
        "pack_linear", "plan_compression", "compress", "linear", "rms_norm", "act_and_mul", "rotate_and_write",
        "experts", "choose_experts", "batched_linear", "rotate_and_write_latent", "paged_attention", "mask_tokens",
        "delta_attention",
        "greedy_tokens", "sample_tokens", "add_lora", "penalize", "count_tokens",
    ):  # fmt: skip
        getattr(library, f"tandem_{name}").restype = None
    return library


@functools.cache
def num_threads_function() -> Any:
    """The C function without arguments that returns the number of torch's threads for the calling thread's loops.

    Not OpenMP's own: in a thread that torch has not computed in yet, that one ignores `torch.set_num_threads`.
    """
    try:
        return ctypes.CDLL(torch._C.__file__)._ZN2at15get_num_threadsEv  # at::get_num_threads()
    except AttributeError:  # another C++ ABI
        return ctypes.CFUNCTYPE(c_int)(torch.get_num_threads)
