"""llama.cpp through its Python bindings, batch by batch; answers with guesses as the bindings' own class gives them.
The checkpoint is written as GGUF: BF16, Q8_0 or Q4_0."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest.bench.peers.adapter import DRAFT, INT4, INT8, MAX_BATCH, MAX_TOKENS, NGRAM, PLAIN, STEP_TOKENS, Settings

_FORMATS = {PLAIN: "BF16", INT8: "Q8_0", INT4: "Q4_0"}
"""It rounds activations to 8 bits too wherever weights are rounded."""
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Module → what GGUF calls it."""
_SEQUENCE_TOKENS = 320
"""Room of each sequence that decodes, tokens."""


class LlamaCpp:
    """See `EngineAdapter`. The output projection has 8 bits in both rounded forms."""

    def __init__(self, settings: Settings) -> None:
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]

        self._llama: Any = llama_cpp
        self._settings = settings
        self._weights = _FORMATS[settings.form]
        self._path = path = _converted(settings.folder, settings.scratch, self._weights)
        self._answering: Any = None
        self._guessing: Any = None
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path.name}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max(MAX_TOKENS, MAX_BATCH * _SEQUENCE_TOKENS)
        params.n_batch = STEP_TOKENS
        params.n_seq_max = MAX_BATCH
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = settings.num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context")
        self._batch = llama_cpp.llama_batch_init(STEP_TOKENS, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def describe(self) -> str:
        """See `EngineAdapter`."""
        return f"llama-cpp-python {self._llama.__version__}, {self._weights} weights, keeps KV in fp16"

    def prefill_s(self, prompt: list[int]) -> float:
        """See `EngineAdapter`."""
        self._clear()
        start = time.perf_counter()
        self._step([(token, place, 0, place + 1 == len(prompt)) for place, token in enumerate(prompt)])
        self._likeliest(len(prompt) - 1)
        return time.perf_counter() - start

    def decode_steps_s(self, prompts: list[list[int]], num_steps: int) -> list[float]:
        """See `EngineAdapter`."""
        self._clear()
        tokens = []
        for sequence, prompt in enumerate(prompts):
            self._step([(token, place, sequence, place + 1 == len(prompt)) for place, token in enumerate(prompt)])
            tokens.append(self._likeliest(len(prompt) - 1))
        times = []
        for step in range(num_steps):
            start = time.perf_counter()
            self._step(
                [(tokens[sequence], len(prompt) + step, sequence, True) for sequence, prompt in enumerate(prompts)]
            )
            tokens = [self._likeliest(row) for row in range(len(prompts))]
            times.append(time.perf_counter() - start)
        return times

    def answer(self, prompt: list[int], num_tokens: int, num_guesses: int) -> tuple[float, list[int]]:
        """See `Answers`."""
        if self._answering is None:
            self._answering = self._opened(self._path)
        if self._guessing is None and self._settings.guesses_by == DRAFT:
            assert self._settings.draft is not None
            self._guessing = self._opened(
                _converted(self._settings.draft, self._settings.scratch / "draft", self._weights)
            )
        llama = self._answering
        for each in filter(None, (llama, self._guessing)):
            each.reset()  # no prefix of an earlier prompt is found
        llama.draft_model = self._drafts(num_guesses)
        # With a draft each row's logits are needed, as the class has it from its start.
        llama._logits_all = llama.draft_model is not None
        begun = 0.0
        tokens: list[int] = []
        for token in itertools.islice(llama.generate(prompt, temp=0.0), num_tokens):
            begun = begun or time.perf_counter()
            tokens.append(token)
        return time.perf_counter() - begun, tokens

    def _opened(self, path: Path) -> Any:
        """One of the bindings' own class, which its users have."""
        return self._llama.Llama(
            str(path),
            n_ctx=MAX_TOKENS,
            n_batch=STEP_TOKENS,
            n_threads=self._settings.num_threads,
            n_threads_batch=self._settings.num_threads,
            logits_all=True,
            verbose=False,
        )

    def _drafts(self, num_guesses: int) -> Any:
        """The drafter of a request, as llama_cpp takes it."""
        import numpy
        from llama_cpp.llama_speculative import (  # type: ignore[import-not-found, unused-ignore]
            LlamaDraftModel,
            LlamaPromptLookupDecoding,
        )

        if self._settings.guesses_by == NGRAM:
            return LlamaPromptLookupDecoding(num_pred_tokens=num_guesses)
        if self._settings.guesses_by != DRAFT:
            return None
        guessing = self._guessing

        class Drafts(LlamaDraftModel):  # type: ignore[misc, unused-ignore]
            def __call__(self, input_ids: Any, /, **_kwargs: Any) -> Any:
                found = itertools.islice(guessing.generate(input_ids.tolist(), temp=0.0), num_guesses)
                return numpy.fromiter(found, dtype=numpy.intc)

        return Drafts()

    def _clear(self) -> None:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), False)

    def _step(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = is_wanted
        if status := self._llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gives {status}")

    def _likeliest(self, row: int) -> int:
        import numpy

        logits = self._llama.llama_get_logits_ith(self._context, row)
        return int(numpy.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def _converted(folder: Path, scratch: Path, weights: str) -> Path:
    """The checkpoint's file."""
    path = scratch / f"{weights}.gguf"
    if not path.exists():
        _write(folder, path, weights)
    return path


def _write(folder: Path, path: Path, weights: str) -> None:
    """The checkpoint as GGUF, without a vocabulary: the benchmark passes token ids."""
    import gguf  # type: ignore[import-not-found, unused-ignore]

    config = json.loads((folder / "config.json").read_text())
    partial = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer: Any = gguf.GGUFWriter(str(partial), "llama", use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    quants = gguf.quants.quantize
    types: Any = gguf.GGMLQuantizationType
    for name, tensor in _tensors(folder):
        module = name.removesuffix(".weight")
        if count := heads.get(module.rpartition(".")[2]):  # rotated pairs lie side by side there
            tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        if tensor.ndim == 1:
            writer.add_tensor(f"{_gguf_name(module)}.weight", tensor)
            continue
        kind = types["Q8_0" if module == "lm_head" and weights == "Q4_0" else weights]
        writer.add_tensor(f"{_gguf_name(module)}.weight", quants(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _gguf_name(module: str) -> str:
    if not module.startswith("model.layers."):
        return _NAMES[module]
    number, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_NAMES[rest]}"


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, fp32 array) of a checkpoint in bf16; numpy has no such numbers, and this venv no torch."""
    import numpy

    for path in sorted(folder.glob("*.safetensors")):
        data = numpy.memmap(path, dtype=numpy.uint8, mode="r")
        size = int(data[:8].view(numpy.uint64)[0])
        for name, entry in json.loads(bytes(data[8 : 8 + size])).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in entry["data_offsets"])
                upper = numpy.frombuffer(data[begin:end], dtype=numpy.uint16).astype(numpy.uint32) << 16
                yield name, upper.view(numpy.float32).reshape(entry["shape"])
