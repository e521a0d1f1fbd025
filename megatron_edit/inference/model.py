"""A model for inference on this rank's part of any tensor and pipeline parallel layout, without optimizer and sync.

Letters in shapes: B sequences, S positions, H hidden size, V vocabulary without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.config.schema import ParallelConfig
from megatron_edit.convert.weights import Weights, cast
from megatron_edit.inference.cache import KeyValueCache
from megatron_edit.inference.sampling import Sampling, next_tokens
from megatron_edit.model.llama import build_model_chunks, transformer_config
from megatron_edit.model.names import canonical_name
from megatron_edit.model.sharding import tensor_parallel_slice
from megatron_edit.parallel.mesh import Mesh


class InferenceModel:
    """`weights` on the mesh, which holds one copy of the model. Every method is collective over the mesh, takes the
    same arguments and returns the same on all its ranks, on the CPU."""

    def __init__(self, weights: Weights, mesh: Mesh, dtype: torch.dtype) -> None:
        layout = mesh.layout
        assert layout.replica_size == layout.tp * layout.pp == layout.world_size, "one copy of the model"
        self.model = replace(weights.model, transformer_impl="local")
        self.vocab_size = weights.vocab_size
        self.mesh = mesh
        self._dtype = dtype
        self._device = mesh.platform.device
        parallel = ParallelConfig(tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp)
        config = transformer_config(self.model, parallel, params_dtype=dtype, device_type=self._device.type)
        (self.chunk,) = build_model_chunks(self.model, config, self.vocab_size, mesh.process_groups)
        self.chunk.eval()
        self._load(weights)
        self._pipeline = mesh.process_groups.pp
        self._last = dist.get_global_rank(self._pipeline, layout.pp - 1)

    @torch.no_grad()
    def _load(self, weights: Weights) -> None:
        tp = self.mesh.process_groups.tp
        for local_name, parameter in self.chunk.named_parameters():
            name = canonical_name(self.chunk, local_name)
            whole = cast(name, weights.read(name), self._dtype)
            parameter.copy_(tensor_parallel_slice(whole, name, self.model, tp.rank(), tp.size()))

    # ---- scores --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, S] -> fp32 [B, S, V]."""
        found = self._forward(tokens)
        shape = (*tokens.shape, self.vocab_size)
        return self._from_last_stage(None if found is None else found.float(), shape, torch.float32)

    @torch.no_grad()
    def log_probabilities(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens int64 [B, S] -> of each token after the first, given those before it: natural logarithm of its
        probability, fp32 [B, S - 1], and whether it is the most likely one, bool [B, S - 1]."""
        found = self._forward(tokens)
        both = None
        if found is not None:
            scores, targets = found[:, :-1].float(), tokens[:, 1:].to(found.device)
            chosen = scores.gather(-1, targets[..., None]).squeeze(-1) - scores.logsumexp(-1)
            both = torch.stack((chosen, (scores.argmax(-1) == targets).float()))
        both = self._from_last_stage(both, (2, tokens.shape[0], tokens.shape[1] - 1), torch.float32)
        return both[0], both[1].bool()

    # ---- generation ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, stop_ids: Sequence[int] = (),
        *, first_sequence: int = 0,
    ) -> list[list[int]]:  # fmt: skip
        """New ids of each prompt, without the stop id that ended it. `first_sequence`: number of the first prompt among
        all, for its generator."""
        assert all(prompts), "a prompt needs a token"
        generators = [sampling.generator(first_sequence + i) for i in range(len(prompts))]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
        cache = KeyValueCache(self.model, len(prompts), longest + max_new_tokens, self._device)
        layers = self.chunk.decoder.layers
        for layer in layers:
            layer.self_attention.cache = cache.layer()
        new: list[list[int]] = [[] for _ in prompts]
        done = [False] * len(prompts)
        try:
            last = lengths - 1  # position of the last known token in what is computed
            for step in range(max_new_tokens):
                found = self._forward(tokens)
                cache.advance((lengths + step).to(self._device))
                chosen = None
                if found is not None:
                    rows = found[torch.arange(len(prompts), device=found.device), last.to(found.device)]
                    chosen = next_tokens(rows, sampling, generators)
                chosen = self._from_last_stage(chosen, (len(prompts),), torch.int64)
                for i, token in enumerate(chosen.tolist()):
                    done[i] = done[i] or token in stop_ids
                    if not done[i]:
                        new[i].append(token)
                if all(done):
                    break
                tokens, last = chosen[:, None], torch.zeros_like(last)
        finally:
            for layer in layers:
                layer.self_attention.cache = None
        return new

    # ---- stages --------------------------------------------------------------------------------------------------

    def _forward(self, tokens: Tensor) -> Tensor | None:
        """On the last stage logits [B, S, V], else None."""
        mesh, stage = self.mesh, self.mesh.place.pp
        if not mesh.is_first_stage:
            shape = (tokens.shape[1], tokens.shape[0], self.model.hidden_size)
            hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
            dist.recv(hidden, dist.get_global_rank(self._pipeline, stage - 1), group=self._pipeline)
            self.chunk.set_input_tensor(hidden)
        output: Any = self.chunk(tokens.to(self._device), None, None, runtime_gather_output=True)
        if mesh.is_last_stage:
            return output[..., : self.vocab_size]
        dist.send(output.contiguous(), dist.get_global_rank(self._pipeline, stage + 1), group=self._pipeline)
        return None

    def _from_last_stage(self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The last stage's tensor on all stages. Its tensor parallel ranks have computed the same."""
        if self._pipeline.size() == 1:
            assert tensor is not None
            return tensor.cpu()
        shared = torch.empty(shape, dtype=dtype, device=self._device)
        if tensor is not None:
            shared.copy_(tensor)
        dist.broadcast(shared, self._last, group=self._pipeline)
        return shared.cpu()
