"""Method draft_model: a smaller model with the target's vocabulary drafts."""

from __future__ import annotations

import logging

from penstock.config import EngineConfig
from penstock.loading.source import ModelSource, resolve_source
from penstock.loading.tasks import choose_task
from penstock.models.assembly import load_model
from penstock.models.runtime import longest_context
from penstock.protocol.errors import ConfigError
from penstock.runner.drafter import DraftSetup
from penstock.runner.drafters.model import ModelDrafter
from penstock.text.tokenizer import load_tokenizer

NUM_COMPARED = 4096  # tokens: those of another tokenizer differ nearly everywhere

logger = logging.getLogger(__name__)


class DraftModelDrafter(ModelDrafter):
    def __init__(self, name: str, num_drafts: int, quantization: str | None = None) -> None:
        super().__init__(num_drafts)
        self._name = name
        self._quantization = quantization

    def load(self, setup: DraftSetup) -> None:
        own, max_model_len = (
            setup.config_of(self._name, self._quantization),
            setup.limits.max_model_len,
        )
        draft = resolve_source(own.model, own.load)
        if choose_task(own, draft) != "generate":
            raise ConfigError(f"the draft model {self._name} does not generate text")
        check_vocabulary(setup.config, setup.source, draft)
        num_positions = longest_context(draft.config)
        if num_positions < max_model_len:
            logger.warning(
                "The draft model's context is %d tokens: drafts end there, requests may have %d",
                num_positions, max_model_len,
            )  # fmt: skip
        model, dtypes, _ = load_model(own, draft, setup.platform, setup.mesh, max_model_len)
        self.use(model, dtypes.kv, setup.max_rows, min(num_positions, max_model_len))


def check_vocabulary(config: EngineConfig, target: ModelSource, draft: ModelSource) -> None:
    """Raise ConfigError unless both models mean the same by a token id."""
    remedy = "choose a draft model of the same family"
    sizes = [int(source.config["vocab_size"]) for source in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the draft model {draft.name} has a vocabulary of {sizes[1]} tokens, {target.name} "
            f"one of {sizes[0]}: {remedy}"
        )
    if config.model.skip_tokenizer_init or draft.path == target.path:
        return
    own, other = load_tokenizer(target, config.model.tokenizer), load_tokenizer(draft)
    size = min(own.vocab_size, other.vocab_size)
    for token_id in range(0, size, max(size // NUM_COMPARED, 1)):
        if own.token_bytes(token_id) != other.token_bytes(token_id):
            raise ConfigError(
                f"the draft model {draft.name} has another tokenizer than {target.name}: token "
                f"{token_id} is {other.token_bytes(token_id)!r}, not {own.token_bytes(token_id)!r}:"
                f" {remedy}"
            )
