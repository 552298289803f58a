"""UserTokenizer: a model's tokenizer with the methods that users of Hugging Face's call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.text.frontend import Frontend


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask`, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class UserTokenizer:
    """Everything else is as in `Tokenizer`: `encode`, `decode`, `eos_token_id`, `vocab_size`."""

    def __init__(self, tokenizer: Tokenizer, frontend: Frontend) -> None:
        self._tokenizer = tokenizer
        self._frontend = frontend

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            return self._tokenizer.special_tokens.get(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoding:
        """Encode one text or several, without padding."""
        if isinstance(text, str):
            token_ids = self._tokenizer.encode(text, add_special_tokens)
            return Encoding(input_ids=token_ids, attention_mask=[1] * len(token_ids))
        several = [self._tokenizer.encode(one, add_special_tokens) for one in text]
        masks = [[1] * len(token_ids) for token_ids in several]
        return Encoding(input_ids=several, attention_mask=masks)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str | list[int] | Encoding:
        """The prompt of a conversation: its tokens, or with `tokenize=False` its text.

        `options` go to the chat template. `chat_template` replaces the model's own.
        """
        text = self._frontend.render_chat(
            conversation, tools=tools, add_generation_prompt=add_generation_prompt, **options
        )
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False)
        return encoding if return_dict else list(encoding.input_ids)

    def batch_decode(
        self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        return [self._tokenizer.decode(one, skip_special_tokens) for one in sequences]

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        token_ids = self._tokenizer.encode(text, add_special_tokens)
        return [self._tokenizer.token_spelling(token_id) for token_id in token_ids]

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str]:
        if isinstance(ids, int):
            return self._tokenizer.token_spelling(ids)
        return [self._tokenizer.token_spelling(token_id) for token_id in ids]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        spelled = ((self._tokenizer.token_spelling(i), i) for i in range(len(self)))
        return {spelling: token_id for spelling, token_id in spelled if spelling}

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_ids)
