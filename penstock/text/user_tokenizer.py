"""UserTokenizer: a model's tokenizer with the methods that users of Hugging Face's call."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tokenizers

from penstock.protocol.errors import InputError
from penstock.text.renderers.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer, read_json_if_there

if TYPE_CHECKING:
    from penstock.text.frontend import Frontend

UNLIMITED = int(1e30)  # Hugging Face's `model_max_length` of tokenizers that name none
UNLIMITED_FROM = int(1e20)  # lengths from here on mean the same
ROLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
LIBRARIES = {"pt": ("torch", "tensor"), "np": ("numpy", "array")}  # imported if they are asked for


def _tensor(rows: Sequence[Sequence[int]], kind: str) -> Any:
    if kind not in LIBRARIES:
        raise InputError(
            f"return_tensors must be one of {', '.join(LIBRARIES)}, got {kind!r:.80}",
            "return_tensors",
        )
    if len({len(row) for row in rows}) > 1:
        raise InputError(
            "texts of different lengths make no tensor: set padding=True, or truncation=True with "
            "a max_length",
            "return_tensors",
        )
    library, function = LIBRARIES[kind]
    return getattr(importlib.import_module(library), function)(rows)


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask`, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class UserTokenizer:
    """What it does not have itself is as in `Tokenizer`.

    A pad token can be chosen: `tokenizer.pad_token = tokenizer.eos_token`.
    """

    def __init__(self, tokenizer: Tokenizer, frontend: Frontend) -> None:
        self._tokenizer = tokenizer
        self._frontend = frontend
        folder = tokenizer.folder
        config = {} if folder is None else read_json_if_there(folder / "tokenizer_config.json")
        self.name_or_path = str(folder or "")
        self.model_max_length = int(config.get("model_max_length") or UNLIMITED)
        self.padding_side: str = config.get("padding_side") or "right"
        self.truncation_side: str = config.get("truncation_side") or "right"
        self._lock = threading.Lock()  # of the backend, which keeps how it cuts and pads

    def __await__(self) -> Generator[None, None, UserTokenizer]:
        """For `await llm.get_tokenizer()`, as older scripts for vLLM have it."""
        return self
        yield

    @functools.cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        """A copy that cuts and pads: the engine's own must not."""
        return tokenizers.Tokenizer.from_str(self._tokenizer.to_json().decode())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ROLES:
            return self._tokenizer.special_tokens.get(name)
        if name.removesuffix("_id") in ROLES:
            token = getattr(self, name.removesuffix("_id"))
            return None if token is None else self._tokenizer.token_id(token)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        return_tensors: str | None = None,
        **others: Any,
    ) -> Encoding:
        """Encode one text or several. Raises `InputError` for keywords it does not have."""
        for name, value in others.items():
            if value not in (None, False) and (name, value) != ("return_attention_mask", True):
                raise InputError(
                    f"{name} is not supported here: use transformers.AutoTokenizer", name
                )
        texts = [text] if isinstance(text, str) else list(text)
        if padding in (False, "do_not_pad") and not truncation and max_length is None:
            several = [self._tokenizer.encode(one, add_special_tokens) for one in texts]
            masks = [[1] * len(token_ids) for token_ids in several]
        else:
            with self._lock:
                self._set_truncation(truncation, padding, max_length)
                self._set_padding(padding, max_length)
                found = self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)
            several = [encoding.ids for encoding in found]
            masks = [encoding.attention_mask for encoding in found]
        if return_tensors is not None:
            return Encoding(
                input_ids=_tensor(several, return_tensors),
                attention_mask=_tensor(masks, return_tensors),
            )
        if isinstance(text, str):
            return Encoding(input_ids=several[0], attention_mask=masks[0])
        return Encoding(input_ids=several, attention_mask=masks)

    def _set_truncation(
        self, truncation: bool | str | None, padding: bool | str, max_length: int | None
    ) -> None:
        if truncation not in (None, False, True, "do_not_truncate", "longest_first", "only_first"):
            raise InputError(
                f"truncation must be True, longest_first or only_first, got {truncation!r:.80}",
                "truncation",
            )
        if truncation is None:  # a length alone truncates
            truncation = max_length is not None and padding is False
        limit = self.model_max_length if max_length is None else max_length
        if truncation in (False, "do_not_truncate") or limit >= UNLIMITED_FROM:
            self._backend.no_truncation()
        else:
            self._backend.enable_truncation(limit, direction=self.truncation_side)

    def _set_padding(self, padding: bool | str, max_length: int | None) -> None:
        if padding not in (False, True, "do_not_pad", "longest", "max_length"):
            raise InputError(
                f"padding must be True, longest or max_length, got {padding!r:.80}", "padding"
            )
        limit = self.model_max_length if max_length is None else max_length
        is_fixed = padding == "max_length"
        if padding in (False, "do_not_pad") or (is_fixed and limit >= UNLIMITED_FROM):
            self._backend.no_padding()
            return
        if self.pad_token_id is None:
            raise InputError(
                "padding needs a pad token, and this tokenizer has none: set tokenizer.pad_token = "
                "tokenizer.eos_token",
                "padding",
            )
        self._backend.enable_padding(
            direction=self.padding_side,
            pad_id=self.pad_token_id,
            pad_token=self.pad_token,
            length=limit if is_fixed else None,
        )

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        """The tokens of one text. `options` are those of a call."""
        return self(text, add_special_tokens=add_special_tokens, **options).input_ids

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """The prompt of a conversation, or of each: its tokens, or with `tokenize=False` its text.

        `options` go to the chat template. `chat_template` replaces the model's own. The tokens are
        an encoding with `return_dict`.
        """
        if options.pop("return_assistant_tokens_mask", False):
            raise InputError(
                "return_assistant_tokens_mask is not supported here: leave it out",
                "return_assistant_tokens_mask",
            )
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        conversations: Sequence[Any] = conversation if several else [conversation]
        texts = [
            self._frontend.render_chat(
                each, tools=tools, add_generation_prompt=add_generation_prompt, **options
            )
            for each in conversations
        ]
        given = texts if several else texts[0]
        if not tokenize:
            return given
        encoding = self(
            given,
            add_special_tokens=False,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
            **(tokenizer_kwargs or {}),
        )
        return encoding if return_dict else encoding.input_ids

    @property
    def chat_template(self) -> str | None:
        """The model's own, if it has one."""
        renderer = self._frontend.renderer
        return renderer.source if isinstance(renderer, ChatTemplate) else None

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of a token, a list of them or a tensor."""
        token_ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        listed = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(listed, skip_special_tokens)

    def batch_decode(
        self, sequences: Iterable[Any], skip_special_tokens: bool = False
    ) -> list[str]:
        return [self.decode(one, skip_special_tokens) for one in sequences]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(list(tokens)))

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
    def special_tokens_map(self) -> dict[str, str]:
        """The tokens with a role, by its name."""
        return {name: token for name in ROLES if (token := getattr(self, name)) is not None}

    @property
    def all_special_tokens(self) -> list[str]:
        return [self._tokenizer.token_spelling(token_id) for token_id in self.all_special_ids]

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self._tokenizer.special_ids)
