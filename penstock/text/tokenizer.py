"""The tokenizer: text to token ids and back, with only the `tokenizers` library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tokenizers

from penstock.loading.gguf.end_tokens import end_token_ids
from penstock.loading.gguf.file import read_gguf
from penstock.loading.hub import fetch_from_hub, is_hub_id
from penstock.loading.source import ModelSource, read_json
from penstock.protocol.errors import InputError, ModelError
from penstock.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_vocabulary,
)
from penstock.text.pieces import PIECE_LENGTH, Cuts
from penstock.text.tekken import FILE as TEKKEN_FILE
from penstock.text.tekken import ROLES as TEKKEN_ROLES
from penstock.text.tekken import read_tekken, tekken_backend
from penstock.text.token_bounds import most_characters

EncodePiece = Callable[[str, bool], list[int]]  # as `Tokenizer.encode_piece`

REMEDY = "give another folder as tokenizer=, or run with skip_tokenizer_init and token ids"


class TooManyTokens(InputError):
    """A text over its token limit.

    `num_tokens` is its length, or a lower bound unless `is_exact`.
    """

    def __init__(self, num_tokens: int, limit: int, is_exact: bool) -> None:
        at_least = "" if is_exact else "at least "
        super().__init__(
            f"the text has {at_least}{num_tokens} tokens, and may have {limit}: send less at a time"
        )
        self.num_tokens = num_tokens
        self.is_exact = is_exact


class PairFrame(NamedTuple):
    """The tokens around the two texts of a pair."""

    before: list[int]
    between: list[int]
    after: list[int]
    has_segments: bool  # the model gets segment ids


class Tokenizer:
    """Encodes and decodes. Safe to share between threads.

    `special_tokens` are those with a role, under the names of chat templates (`bos_token`,
    `eos_token`, ...). `end_ids` are all tokens that end an output. `folder` is the source folder,
    if any.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        extra_end_ids: Iterable[int] = (),
        folder: Path | None = None,
    ) -> None:
        self.folder = folder
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bytes = byte_vocabulary(backend)
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.vocab_size: int = max(  # above all ids; the count is not, if ids have gaps
            [backend.get_vocab_size(with_added_tokens=True), *(token_id + 1 for token_id in added)]
        )
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        ends = (
            [*extra_end_ids] if self.eos_token_id is None else [self.eos_token_id, *extra_end_ids]
        )
        self.end_ids = frozenset(ends)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        token_id: int | None = None if token is None else self._backend.token_to_id(token)
        return token_id

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        limit: int | None = None,
        encode_piece: EncodePiece | None = None,
    ) -> list[int]:
        """The token ids of `text`. Special tokens written in it are recognized.

        Raises `TooManyTokens` as soon as there are more than `limit`. Long texts are encoded by
        `encode_piece` if given, and in pieces if the tokenizer permits.
        """
        _check_characters(text)

        def check(num_tokens: int, is_exact: bool = False) -> None:
            if limit is not None and num_tokens > limit:
                raise TooManyTokens(num_tokens, limit, is_exact)

        def foresee(num_tokens: int, rest: str) -> None:
            if (
                limit is not None and num_tokens + len(rest) > limit
            ):  # else the length gives no bound
                check(num_tokens + self.fewest_tokens(rest))

        foresee(0, text)
        encode = encode_piece or self.encode_piece
        if len(text) <= PIECE_LENGTH:
            ids = self.encode_piece(text, add_special_tokens)
        elif (frame := self.frame(add_special_tokens)) is None:
            ids = encode(text, add_special_tokens)
        else:
            before, after = frame
            ids = [*before]
            for piece in self._cuts.pieces(text):
                foresee(len(ids), piece)
                ids += encode(piece, False)
                check(len(ids))
            ids += after
        check(len(ids), is_exact=True)
        return ids

    def encode_part(
        self,
        text: str,
        num_tokens: int,
        side: Literal["first", "last"],
        add_special_tokens: bool = True,
        encode_piece: EncodePiece | None = None,
    ) -> list[int]:
        """The first or last tokens of `text`. Encodes no more of the text than necessary."""
        frame = self.frame(add_special_tokens) if len(text) > PIECE_LENGTH else None
        if frame is None:
            ids = self.encode(text, add_special_tokens, encode_piece=encode_piece)
            return ids[:num_tokens] if side == "first" else ids[-num_tokens:]
        _check_characters(text)
        before, after = frame
        encode = encode_piece or self.encode_piece
        if side == "first":
            ids = [*before]
            for piece in self._cuts.pieces(text):
                if len(ids) >= num_tokens:
                    return ids[:num_tokens]
                ids += encode(piece, False)
            return [*ids, *after][:num_tokens]
        ids = [*after]
        for piece in self._cuts.pieces_from_end(text):
            if len(ids) >= num_tokens:
                return ids[-num_tokens:]
            ids = encode(piece, False) + ids
        return [*before, *ids][-num_tokens:]

    @functools.cached_property
    def pair_frame(self) -> PairFrame:
        """The tokens around the two texts of a pair."""
        bare = self.encode_piece("a")
        encoding = self._backend.encode("a", "a")
        ids, sequences = encoding.ids, encoding.sequence_ids
        first = sequences.index(0) if 0 in sequences else 0
        second = sequences.index(1) if 1 in sequences else first + len(bare)
        return PairFrame(
            ids[:first],
            ids[first + len(bare) : second],
            ids[second + len(bare) :],
            has_segments=encoding.type_ids[second] == 1,
        )

    def encode_piece(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a piece of text, or of a whole text with special tokens."""
        # Unlike `encode`, this releases the GIL, which a long text would hold.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    @functools.cached_property
    def _cuts(self) -> Cuts:
        return Cuts(self.encode_piece, self._backend.get_vocab(with_added_tokens=False))

    def frame(self, add_special_tokens: bool) -> tuple[list[int], list[int]] | None:
        """The tokens before and after a text; None if the tokenizer does more than add them."""
        if not add_special_tokens:
            return [], []
        bare, framed = self.encode_piece("a"), self.encode_piece("a", True)
        size = len(bare)
        starts = [at for at in range(len(framed)) if framed[at : at + size] == bare]
        if not bare or len(starts) != 1:
            return None
        return framed[: starts[0]], framed[starts[0] + size :]

    def fewest_tokens(self, text: str) -> int:
        """The minimum number of tokens of a text of this length; 0 if unknown."""
        return 0 if self._most_characters is None else -(-len(text) // self._most_characters)

    @functools.cached_property
    def _most_characters(self) -> int | None:
        if self._bytes is None:
            return None
        return most_characters(self._backend, self._bytes.byte_level)

    def to_json(self) -> bytes:
        """Everything that `encode_piece` needs in another process."""
        return str(self._backend.to_str()).encode()

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of all tokens together. Invalid UTF-8 becomes U+FFFD."""
        hidden = self.hidden_ids(skip_special_tokens)
        visible = [token_id for token_id in token_ids if token_id not in hidden]
        if self._bytes is not None:
            return self._bytes.decode(visible)
        return str(self._backend.decode(visible, skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """How one token reads within a text, special or not."""
        if self._bytes is not None:
            return self._bytes[token_id].decode("utf-8", "replace")
        return str(self._backend.decode([token_id], skip_special_tokens=False))

    def token_spelling(self, token_id: int) -> str:
        """The vocabulary's spelling of a token, such as ``Ġthe``; empty for an id without one."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text. They need not be valid UTF-8."""
        if self._bytes is not None:
            return self._bytes[token_id]
        return self.token_text(token_id).encode()

    def detokenizer(
        self,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_tokens: Iterable[str] = (),
    ) -> Detokenizer:
        """An incremental detokenizer that continues from `context` (the prompt).

        `shown_tokens` are shown even if they are special.
        """
        hidden = self.hidden_ids(skip_special_tokens, shown_tokens)
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes, hidden, context)
        return WindowDetokenizer(self._backend, hidden, context)

    def hidden_ids(
        self, skip_special_tokens: bool, shown_tokens: Iterable[str] = ()
    ) -> frozenset[int]:
        """The tokens that are omitted from text."""
        if not skip_special_tokens:
            return frozenset()
        return self.special_ids.difference(map(self._backend.token_to_id, shown_tokens))

    def token_id(self, text: str) -> int | None:
        """The token that is spelled so in the vocabulary."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def is_special(self, text: str) -> bool:
        """Whether a special token has this text."""
        return self._backend.token_to_id(text) in self.special_ids

    def is_token(self, text: str) -> bool:
        """Whether a token, special or not, has this text."""
        return self.token_id(text) is not None

    @property
    def spells_bytes(self) -> bool:
        """Whether a text's bytes are those of its tokens, concatenated."""
        return self._bytes is not None


def _check_characters(text: str) -> None:
    for start in range(0, len(text), PIECE_LENGTH):
        try:
            text[start : start + PIECE_LENGTH].encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has a lone surrogate at position {start + error.start}, which is not a "
                "character"
            ) from None


def load_tokenizer(source: ModelSource, tokenizer: str | None = None) -> Tokenizer:
    """The model's own tokenizer, or that of the folder, GGUF file or hub id in `tokenizer`."""
    if tokenizer is not None:
        path = Path(tokenizer).expanduser()
        if path.is_file() and path.suffix == ".gguf":
            return tokenizer_from_gguf(read_gguf(path).metadata)
        if not path.is_dir():
            if not is_hub_id(tokenizer):
                raise ModelError(
                    "tokenizer must name a folder with tokenizer.json, a .gguf file or a hub id, "
                    f"got {tokenizer!r}"
                )
            path = fetch_from_hub(tokenizer, None, "dummy", None)  # everything except tensors
        return tokenizer_from_folder(path)
    if source.gguf is not None:
        return tokenizer_from_gguf(source.gguf.metadata)
    return tokenizer_from_folder(source.path)


def eos_token_ids(source: ModelSource, tokenizer: Tokenizer | None) -> list[int]:
    """Every token that ends a text. The generation config may name several."""
    found: list[int] = []
    for config in (source.generation_config, source.config):
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise ModelError(
                f"{source.path}: eos_token_id must be a token id or a list of them, "
                f"got {value!r:.80}"
            )
        found += ids
    if tokenizer is not None:
        found += tokenizer.end_ids
    return sorted(set(found))


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    from penstock.text import gguf_tokenizer as gguf

    backend = gguf.gguf_tokenizer(metadata)
    return Tokenizer(backend, gguf.gguf_special_tokens(metadata), end_token_ids(metadata))


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """A tokenizer from tokenizer.json, with special tokens of tokenizer_config.json.

    Only tokenizer.json's post-processor adds tokens around a prompt, as in `transformers`:
    `add_bos_token` in tokenizer_config.json has no effect.
    """
    path = folder / "tokenizer.json"
    if not path.is_file() and (tekken := read_tekken(folder)) is not None:
        try:
            backend = tekken_backend(tekken)
        except Exception as error:  # any problem of the file, or an exception of the library
            raise ModelError(
                f"{folder / TEKKEN_FILE} is not a tokenizer ({error!r}): {REMEDY}"
            ) from error
        return Tokenizer(backend, TEKKEN_ROLES, folder=folder)
    if not path.is_file():
        raise ModelError(f"{path} does not exist{_other_format(folder)}: {REMEDY}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions for what it cannot parse
        raise ModelError(f"{path} is not a tokenizer ({error}): {REMEDY}") from error
    config = read_json_if_there(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **read_json_if_there(folder / "special_tokens_map.json")}
    special_tokens = {
        name: content
        for name, value in config.items()
        if name.endswith("_token") and (content := _content(value)) is not None
    }
    try:
        _add_tokens(
            backend, config, read_json_if_there(folder / "added_tokens.json"), special_tokens
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"the added tokens in {folder} are malformed ({error})") from error
    return Tokenizer(backend, special_tokens, folder=folder)


def _add_tokens(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    legacy_added: Mapping[str, int],
    special_tokens: Mapping[str, str],
) -> None:
    """Add tokens that only the configuration contains, in the order of their ids."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    special = {*special_tokens.values(), *(_content(token) for token in extra)} - {None}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder")
    if declared is not None:
        added = [tokenizers.AddedToken(**declared[key]) for key in sorted(declared, key=int)]
    else:
        added = [
            tokenizers.AddedToken(token, special=token in special, normalized=token not in special)
            for token in sorted(legacy_added, key=lambda token: legacy_added[token])
        ]
    backend.add_tokens([token for token in added if token.content not in known])
    by_content = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    ordered = [*special_tokens.values(), *filter(None, map(_content, extra))]
    for content in ordered:
        token = by_content.get(content) or tokenizers.AddedToken(content, normalized=False)
        token.special = True
        backend.add_special_tokens([token])


def _content(value: Any) -> str | None:
    """A token in a configuration file: a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The object in a configuration file; {} if there is no such file."""
    return read_json(path) if path.exists() else {}


def _other_format(folder: Path) -> str:
    others = [
        name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).is_file()
    ]
    return f" (only {', '.join(others)}, which must be converted first)" if others else ""
