"""A decoder-only transformer: token ids and paged KV in, logits out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from shared.collectives.interface import Collectives
from shared.kernels.backend import Kernels
from shared.kernels.backends.registry import AUTO
from shared.kernels.batch import AttentionBatch
from shared.kernels.cpu.torch_threads import in_this_thread
from shared.kernels.layer_stack import LayerInputs, LayerSizes, LayerStack, StacksLayers
from shared.kernels.lora.parts import MAX_RANK
from shared.kernels.lora.step import PROJECTIONS, HostCopy, Loras, PackedAdapter
from shared.kernels.pool_view import PoolView
from shared.model.adapters.adapter import MAX_BYTES, Adapter, in_dtype, read_adapter
from shared.model.config.model_config import ModelConfig
from shared.model.families.eagle3 import read_eagle
from shared.model.families.registry import load_config
from shared.model.kernel_choice import check_deterministic, check_kernels, check_specs, kernels_for, stacks
from shared.model.layers.head import Head, HeadParameters, listed_rows
from shared.model.layers.modules import DecoderModules, add_up
from shared.model.layers.parameters import DecoderParameters
from shared.model.layers.pieces import DecoderPieces
from shared.model.layers.rope import Rotary
from shared.model.layers.scales import scaled_embedding, scaled_logits
from shared.model.weights.checkpoint import Checkpoint
from shared.model.weights.head_checkpoint import check_head, read_head
from shared.model.weights.loader import OnProgress, ask_for_huge_pages, fill_weights
from shared.model.weights.plan import AS_STORED, Quantization, WeightPlan


class Decoder:
    """One model on one device, for inference alone: plain tensors, no autograd.

    It keeps no state between calls; the past of a sequence is in its KV blocks. Concurrent calls are safe as long as
    their batches write to different blocks.
    """

    num_stages = 1
    """Groups of processes that its layers are spread over."""
    is_split = False
    """Whether the vocabulary's rows, and so the logits, are spread over processes."""
    waits_for_ranks = False
    """Whether a call returns only when other processes have computed their parts."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: DecoderParameters,
        kernels: Kernels | None = None,
        group: Collectives | None = None,
        places: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Takes ownership of the parameters, whose memory the kernels' linear layers may lay out anew.

        Without `kernels`, `kernels_for` picks them by the parameters' device and dtype. `group`: the ranks that
        projections are split over; what `o` and `down` give is then a part of a sum. `places`: as `DecoderPieces`.
        Raises ConfigError where the kernels cannot serve this architecture.
        """
        self.config = config
        self.quantization = ""
        """Kinds of weights in fewer bits, such as `int4+int8`."""
        self.dtype = parameters.embedding.dtype
        self.device = parameters.embedding.device
        self.rotary = Rotary(config, self.device, self.dtype)
        self.kernels = kernels or kernels_for(config, self.device, self.dtype)
        check_kernels(config, self.kernels)
        self._modules = modules = DecoderModules.build(parameters, self.kernels, config)
        pieces = modules if group is None else add_up(modules, group)
        self.pieces = DecoderPieces(config, pieces, self.kernels, places)
        self.head: Head | None = None
        """What guesses the token after the next one, where it was loaded."""
        self._stack: LayerStack | None = None
        if stacks(config) and isinstance(self.kernels, StacksLayers):
            sizes = _sizes(config, config.layer_places if places is None else places)
            self._stack = self.kernels.stack_layers(modules.layers, modules.norm, sizes, group)

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device | str,
        on_progress: OnProgress | None = None,
        kernels: str = AUTO,
        *,
        deterministic: bool = False,
        quantization: Quantization = AS_STORED,
        has_head: bool = False,
        head_folder: Path | None = None,
    ) -> Decoder:
        """Read a model folder in Hugging Face layout.

        Args:
            folder: holds `config.json` and safetensors files.
            dtype: of the parameters and of the computation: float32, bfloat16 or float16.
            device: where the parameters go.
            on_progress: called with (loaded_bytes, total_bytes) after each tensor.
            kernels: a backend's name, or `auto`; see `kernels_for`.
            deterministic: each sequence's results depend on that sequence alone, to the bit.
            quantization: the kind that plain weights are rounded to.
            has_head: whether to load the head too.
            head_folder: of a head apart, which is loaded in place of the checkpoint's own.

        Raises:
            ConfigError: those kernels cannot serve this device, dtype or architecture, or these sizes in that mode; the
                head is another model's.
            ModelLoadError: the folder cannot be served; see `load_config` and `match_sources`.
        """
        if torch.device(device).type == "cpu":
            ask_for_huge_pages()
        config = load_config(folder)
        if head_folder is not None:
            config, has_head = replace(config, head=read_eagle(head_folder, config)), False
        if deterministic:
            check_deterministic(config)
        with Checkpoint.of(folder, ahead=torch.device(device).type == "cuda") as checkpoint:
            if has_head:
                check_head(checkpoint, config)
            plan = WeightPlan.make(checkpoint, config, quantization, has_head=has_head, device=device)
            in_codes = bool(plan.specs)
            chosen = kernels_for(config, device, dtype, kernels, deterministic=deterministic, in_codes=in_codes)
            check_specs(plan.specs, chosen, device)
            parameters = DecoderParameters.allocate(config, dtype, device, specs=plan.specs)
            views, head = parameters.checkpoint_views(config), None
            if has_head:
                head = HeadParameters.allocate(config, dtype, device, plan.specs)
                views |= head.checkpoint_views(config)
            fill_weights(checkpoint, plan.sources, views, on_progress)
        if head_folder is not None:
            head = read_head(head_folder, config, dtype, device)
        elif head is not None:
            head = replace(head, listed=listed_rows(parameters, config.vocab_size))
        # A head's layer may move others to other groups.
        places = None if head is None else config.with_head().layer_places[:-1]
        decoder = cls(config, parameters, chosen, places=places)
        if head is not None:
            decoder.add_head(config, head)
        decoder.quantization = plan.kinds
        return decoder

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        pool: PoolView,
        batch: AttentionBatch,
        logit_rows: Tensor,
        rope_lengths: Tensor | None = None,
        num_candidates: int = 0,
        loras: Loras | None = None,
    ) -> Tensor:
        """Compute one step: write the K and V of all its tokens, return the logits of some.

        Args:
            token_ids: [num_tokens] int64, below `vocab_size`.
            positions: [num_tokens] int64, each token's position in its sequence.
            pool: of blocks of a `ModelConfig.block_layout`, changed in place.
            batch: the step's sequences.
            logit_rows: [num_logits] int64, rows of the step's tokens.
            rope_lengths: [num_tokens] int64, required if `rotary.needs_lengths`.
            num_candidates: number of highest logits of each row that are needed, the others may be -inf; 0 = all. A
                vocabulary that is split over ranks is then not gathered.
            loras: what adapters add, of `pack_adapter`; None where no token has one.

        Returns:
            [num_logits, vocab_size] fp32, computed in the model's dtype.
        """
        normed = self.hidden(token_ids, positions, pool, batch, logit_rows, rope_lengths, loras)
        return self.logits(normed, num_candidates)

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        pool: PoolView,
        batch: AttentionBatch,
        rows: Tensor,
        rope_lengths: Tensor | None = None,
        loras: Loras | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """As `forward`, but for the last layer's output behind the final norm: [len(rows), hidden_size] in the model's
        dtype. `kept`: [num_tokens, len(behind), hidden_size], filled with what a head joins that reads several
        layers."""
        assert token_ids.shape == positions.shape == (batch.num_tokens,)
        assert rows.dim() == 1
        x, cos, sin = self.embed(token_ids, positions, rope_lengths)
        return self._run(LayerInputs(x, cos, sin, pool, batch, loras, kept), rows)

    def _run(self, inputs: LayerInputs, rows: Tensor) -> Tensor:
        """As `LayerStack.run`, by one call for all layers where there is a stack."""
        layers = self._stack if self._stack is not None and inputs.batch.num_tokens else self.pieces
        return layers.run(inputs, rows)

    def embed(self, token_ids: Tensor, positions: Tensor, rope_lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The first layer's inputs: the tokens' rows [num_tokens, hidden_size], and their angles' cosines and sines
        [num_encodings, num_tokens, rotary_dim]. Arguments as for `forward`."""
        with in_this_thread(token_ids, token_ids.shape[0] * self.config.hidden_size):
            cos, sin = self.rotary.cos_sin(positions, rope_lengths)
            return scaled_embedding(functional.embedding(token_ids, self._modules.embedding), self.config), cos, sin

    def logits(self, normed: Tensor, num_candidates: int = 0) -> Tensor:  # noqa: ARG002
        """[num_logits, hidden_size], the layers' output, to [num_logits, vocab_size] fp32; `num_candidates` as for
        `forward`."""
        logits = self._modules.lm_head.forward(normed)
        with in_this_thread(logits, logits.numel()):
            return scaled_logits(logits.float(), self.config)

    def read_adapter(self, folder: Path, *, max_rank: int = MAX_RANK, max_bytes: int = MAX_BYTES) -> Adapter:
        """As `shared.model.adapters.adapter.read_adapter`, for this model. From any thread."""
        return read_adapter(folder, self.config, max_rank=max_rank, max_bytes=max_bytes)

    def pack_adapter(self, adapter: Adapter) -> PackedAdapter:
        """An adapter that was read for this model, laid out for its kernels on its device. From any thread."""
        assert len(adapter.layers) == len(self._modules.layers), "an adapter of another model"
        layers, like = self._modules.layers, self._modules.embedding
        in_sizes = [
            {name: 0 if (linear := getattr(layer, name)) is None else linear.in_size for name in PROJECTIONS}
            for layer in layers
        ]
        experts = {
            index: modules.experts.make_loras(parts, like)
            for index, parts in adapter.experts.items()
            if (modules := layers[index].experts) is not None
        }
        return PackedAdapter.of(adapter.layers, in_sizes, self.kernels, like, experts)

    def host_copy(self, adapter: Adapter, packed: PackedAdapter) -> HostCopy:
        """What brings an adapter back that was laid out as `packed`. On a CPU that is `packed` itself."""
        if self.device.type == "cpu":
            return HostCopy(packed.nbytes, lambda: packed)
        kept = in_dtype(adapter, self._modules.embedding.dtype)
        return HostCopy(kept.nbytes, lambda: self.pack_adapter(kept))

    @property
    def first_norm(self) -> Tensor | None:
        """[hidden_size], weight of the norm that begins a step, None where that changes nothing."""
        return self._modules.layers[0].input_norm

    @property
    def projection_bytes(self) -> int:
        """See `DecoderModules`."""
        return self._modules.projection_bytes

    @property
    def expert_bytes(self) -> int:
        """See `DecoderModules`."""
        return self._modules.expert_bytes

    def expert_tokens(self) -> list[int]:
        """Choices of experts by tokens since start, by the rank that holds them, all layers together; 0 off the CPU.
        From any thread."""
        return [sum(int(counts.sum()) for counts in self.pieces.num_chosen.values())]

    def add_head(self, config: ModelConfig, parameters: HeadParameters) -> None:
        """Takes ownership of the parameters of a head; `config`: this decoder's, with the layer of it."""
        assert not self.is_split, "a head is not spread over ranks"
        self.config = config
        self.head = Head(config, parameters, self._modules, self.kernels)

    def op_by_op(self, kernels: Kernels) -> Decoder:
        """The same model with one call of `kernels` for each op and all tokens, never one call for all layers."""
        other = copy.copy(self)
        other.kernels = kernels
        other.pieces = self.pieces.over(kernels)
        other._stack = None
        return other


def _sizes(config: ModelConfig, places: Sequence[tuple[int, int]]) -> LayerSizes:
    return LayerSizes(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rms_norm_eps,
        config.attention_scale,
        windows=tuple(layer.window for layer in config.layers),
        are_chunked=tuple(layer.is_chunked for layer in config.layers),
        encodings=tuple(config.ropes.index(layer.rope) for layer in config.layers),
        temperatures=tuple(map(config.temperature_encoding, range(config.num_layers))),
        num_encodings=len(config.ropes) + len(config.temperatures),
        places=tuple(places),
        softcap=config.softcap,
        activation=config.activation,
        is_centered=config.is_centered,
        kept_behind=() if config.head is None else config.head.behind,
    )
