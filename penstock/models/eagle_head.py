"""What EAGLE and EAGLE-3 heads have in common: where embedding and output head come from."""

from __future__ import annotations

import torch

from penstock.layers.build import Build
from penstock.layers.embedding import VocabEmbedding
from penstock.models.base import Hidden, Model
from penstock.models.config import DecoderConfig

CHUNK = 4096  # tokens that are compared at once


class EagleHead(Model):
    """Not a model of its own: `draft` takes the place of `forward`.

    It has the embedding and the output head of its checkpoint, and otherwise those of the target.
    """

    def __init__(
        self,
        build: Build,
        config: DecoderConfig,
        target: Model,
        has_embedding: bool,
        num_logits: int | None,  # of an output head of its own; None: it has none
    ) -> None:
        super().__init__()
        size, vocab_size = config.hidden_size, config.vocab_size
        self.vocab_size, self.hidden_size, self.dtype = vocab_size, size, build.dtype
        self.device = build.device
        self.embed_tokens = VocabEmbedding(build, vocab_size, size) if has_embedding else None
        self.lm_head = None if num_logits is None else VocabEmbedding(build, num_logits, size)
        # Not parts of this model: their weights are loaded.
        self._embed_target, self._project_target = target.embed, target.logits

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is None:
            return self._embed_target(token_ids)
        embedded: torch.Tensor = self.embed_tokens(token_ids)
        return embedded

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Logits over the tokens that it drafts."""
        if self.lm_head is None:
            return self._project_target(Hidden(states), slice(None))
        return self.lm_head.project(states)

    @torch.inference_mode()
    def share(self) -> None:
        """Drop copies of the target's weights, which many checkpoints have."""
        if self.embed_tokens is not None and self._embeds_alike(self.embed_tokens):
            self.embed_tokens = None
        if self.lm_head is not None and self._projects_alike(self.lm_head):
            self.lm_head = None

    def _embeds_alike(self, own: VocabEmbedding) -> bool:
        for first in range(0, self.vocab_size, CHUNK):
            end = min(first + CHUNK, self.vocab_size)
            ids = torch.arange(first, end, device=self.device)
            if not torch.equal(own(ids), self._embed_target(ids).to(self.dtype)):
                return False
        return True

    def _projects_alike(self, own: VocabEmbedding) -> bool:
        """By the logits of one state: other weights would give other ones for some token."""
        if own.vocab_size != self.vocab_size:
            return False
        state = torch.arange(self.hidden_size, device=self.device).cos().to(self.dtype)[None]
        theirs = self._project_target(Hidden(state), slice(None))
        return torch.equal(own.project(state).float(), theirs.float())
