"""One protocol over three kinds of tokenizer: `tokenizers` JSON, SentencePiece models, transformers directories.
Nothing is downloaded, no code from the directory is run and no pickle is read. `encode` adds no special tokens: where a
document ends is the dataset's business (`--append-eod`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
import tokenizers

from megacore.data.tokenizers.growth import growth, growth_of_model
from megacore.data.tokenizers.vocabulary import (
    ROLES,
    byte_level_bpe,
    is_plain_vocabulary,
    role_tokens,
    word_starts,
    wordpiece,
)
from megacore.errors import DataError
from megacore.files import read_bounded, replace_bytes
from megacore.safe_json import parse_json

END_OF_TEXT = "<|endoftext|>"
# Tried in this order when no tokenizer_config.json names the end-of-document token.
_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
# The tokenizer_config.json that GPT-2's vocab.json and merges.txt need.
_WAY_OUT = "give a tokenizer.json, a *.model or a directory that holds one"
_MOST_GROWTH = 100  # of a text in the tokenizer; with those in use it is less than 3
_MOST_BYTES = 1 << 28  # of a tokenizer's file; the largest in use has a tenth of it
_GPT2_CLASS = '{"tokenizer_class": "GPT2TokenizerFast"}'


class Tokenizer(Protocol):
    """What the rest of megacore knows about a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token, or None where the tokenizer has none."""

    @property
    def bos(self) -> int | None:
        """Id of the token that begins a text, or None where none is named."""

    @property
    def roles(self) -> Mapping[str, int]:
        """Ids of the tokens that BERT needs and this tokenizer has, by `cls`, `sep`, `mask` and `pad`."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that are no text: those of the roles, end of document, unknown, control."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what decides the ids; datasets and checkpoints record it."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text; may use several threads."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens are left out."""

    def piece(self, index: int) -> str:
        """How the vocabulary spells an id below `vocab_size`; empty where it has none of that number."""

    def word_starts(self) -> list[bool] | None:
        """Whether each id begins a word by the tokenizer's marks, None where it has none."""

    def save(self, directory: str | Path) -> None:
        """Write files from which `load_tokenizer(directory)` makes the same tokenizer."""


class JsonTokenizer:
    """A tokenizer of the `tokenizers` library (a tokenizer.json, or a transformers fast tokenizer's backend)."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        end_token: str | None = None,
        source: str = "tokenizer",
        *,
        named: Mapping[str, str] | None = None,
    ) -> None:
        # What a tokenizer.json stores of both would silently cut documents, or pad them.
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._source = backend, source
        known = (token for token in _END_TOKENS if backend.token_to_id(token) is not None)
        self._end_token = end_token if end_token is not None else next(known, None)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{source}: the tokenizer has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod: int | None = vocabulary.get(self._end_token) if self._end_token else None
        named = named or {}
        self._first_token = named["bos"] if named.get("bos") in vocabulary else None
        self.bos: int | None = vocabulary[self._first_token] if self._first_token is not None else None
        self._role_tokens = role_tokens(vocabulary, named)
        self.roles: Mapping[str, int] = {role: vocabulary[token] for role, token in self._role_tokens.items()}
        added = backend.get_added_tokens_decoder().items()
        ends = () if self.eod is None else (self.eod,)
        self.special_ids = frozenset((*(i for i, token in added if token.special), *self.roles.values(), *ends))
        described = json.loads(backend.to_str())
        _require_growth(max(growth(described["normalizer"]), growth(described["decoder"])), source)
        canonical = json.dumps(described, sort_keys=True, separators=(",", ":"))
        self.fingerprint = hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()

    def encode(self, text: str) -> list[int]:
        with _telling_panics(self._source):
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """On threads unless TOKENIZERS_PARALLELISM=false."""
        # The fast variant leaves out character offsets, which nobody here asks for.
        with _telling_panics(self._source):
            return [item.ids for item in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def to_json(self) -> str:
        text: str = self._backend.to_str()
        return text

    def decode(self, ids: Sequence[int]) -> str:
        with _telling_panics(self._source):
            text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def piece(self, index: int) -> str:
        return self._backend.id_to_token(index) or ""

    def word_starts(self) -> list[bool] | None:
        pieces = [""] * self.vocab_size
        for piece, number in self._backend.get_vocab(with_added_tokens=True).items():
            pieces[number] = piece
        return word_starts(pieces, json.loads(self._backend.to_str()))

    def save(self, directory: str | Path) -> None:
        """Also writes a tokenizer_config.json, which transformers reads."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        replace_bytes(folder / "tokenizer.json", self._backend.to_str(pretty=True).encode())
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if self._end_token is not None and self.eod is not None:
            config["eos_token"] = self._end_token
        if self._first_token is not None:
            config["bos_token"] = self._first_token
        if len(self._role_tokens) == len(ROLES):
            config |= {f"{role}_token": token for role, token in self._role_tokens.items()}
        replace_bytes(folder / "tokenizer_config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


class SentencePieceTokenizer:
    """A SentencePiece model (*.model)."""

    def __init__(self, model: bytes, source: str = "tokenizer") -> None:
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, OSError) as error:
            raise DataError(f"{source}: not a SentencePiece model ({_first_line(error)}): {_WAY_OUT}") from error
        _require_growth(growth_of_model(model), source)
        self.vocab_size: int = self._processor.vocab_size()
        if self.vocab_size < 1:
            raise DataError(f"{source}: the tokenizer has an empty vocabulary")
        self.eod: int | None = self._processor.eos_id()
        if self.eod < 0:
            piece = self._processor.piece_to_id(END_OF_TEXT)
            self.eod = None if piece == self._processor.unk_id() else int(piece)
        self.bos: int | None = self._processor.bos_id() if self._processor.bos_id() >= 0 else None
        pieces = {self._processor.id_to_piece(i): i for i in range(self.vocab_size)}
        self.roles: Mapping[str, int] = {role: pieces[token] for role, token in role_tokens(pieces, {}).items()}
        control = (i for i in range(self.vocab_size) if self._processor.is_control(i) or self._processor.is_unknown(i))
        ends = () if self.eod is None else (self.eod,)
        self.special_ids = frozenset((*control, *self.roles.values(), *ends))
        self.fingerprint = hashlib.sha256(model).hexdigest()

    def __reduce__(self) -> tuple[type[SentencePieceTokenizer], tuple[bytes]]:
        return SentencePieceTokenizer, (self._model,)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """On one thread: the workers of a preprocessing run are the parallelism."""
        return [self._processor.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode([int(index) for index in ids])
        return text

    def piece(self, index: int) -> str:
        return str(self._processor.id_to_piece(index))

    def word_starts(self) -> list[bool] | None:
        return word_starts([self.piece(i) for i in range(self.vocab_size)], {"model": {"type": "Metaspace"}})

    def save(self, directory: str | Path) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        replace_bytes(folder / "tokenizer.model", self._model)


def load_tokenizer(path: str | Path, merges: str | Path | None = None) -> Tokenizer:
    """Load the tokenizer at a path: a tokenizer.json, a SentencePiece *.model, a GPT-2 vocabulary (.json; `merges`:
    None: the file beside it) or a BERT one (.txt), or a directory with one of the first two or of transformers. Raises
    DataError where nothing is there, or it is no tokenizer."""
    path = Path(path)
    if path.is_dir():
        return _load_directory(path)
    if not path.is_file():  # a device or a pipe would be read for ever
        raise DataError(f"{path}: no such tokenizer: {_WAY_OUT}")
    if path.suffix == ".model":
        return SentencePieceTokenizer(_read(path), str(path))
    backend = _of_vocabulary(path, None if merges is None else Path(merges))
    return _load_json(path) if backend is None else JsonTokenizer(backend, source=str(path))


def _of_vocabulary(path: Path, merges: Path | None) -> tokenizers.Tokenizer | None:
    """The tokenizer of a vocabulary file of GPT-2 or BERT; None for a file of another kind. Raises DataError where the
    merges are missing, or the files do not fit each other."""
    is_gpt2 = path.suffix == ".json" and (merges is not None or is_plain_vocabulary(_read(path)))
    if not is_gpt2 and path.suffix != ".txt":
        return None
    if is_gpt2 and merges is None:
        merges = path.with_name(path.name.replace("vocab.json", "merges.txt"))
        if merges == path or not merges.is_file():
            raise DataError(f"{path} is a vocabulary without its merges: give them with --merge-file merges.txt")
    try:
        return wordpiece(_read(path)) if merges is None else byte_level_bpe(_read(path), _read(merges))
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the files
        raise DataError(f"{path}: not a vocabulary of GPT-2 or BERT ({_first_line(error)}): {_WAY_OUT}") from error


def _load_directory(folder: Path) -> Tokenizer:
    """Prefer tokenizer.json, then a SentencePiece model that has all tokens; leave the rest to transformers."""
    if (folder / "tokenizer.json").exists():
        return _load_json(folder / "tokenizer.json")
    config = folder / "tokenizer_config.json"
    if (folder / "tokenizer.model").exists():
        try:
            tokenizer = SentencePieceTokenizer(_read(folder / "tokenizer.model"), str(folder / "tokenizer.model"))
        except DataError:  # tiktoken's files have the same name
            if not config.exists():
                raise
        else:
            pieces = [tokenizer.piece(i) for i in range(tokenizer.vocab_size)]
            end = _configured_tokens(config).get("eos")
            # transformers may name another end of document, or add tokens: then only it gives the right ids.
            has_end = end is None or (tokenizer.eod is not None and pieces[tokenizer.eod] == end)
            if has_end and _added_tokens(folder) <= set(pieces):
                return tokenizer
    if config.exists() or any((folder / name).exists() for name in ("vocab.json", "vocab.txt", "config.json")):
        return _load_transformers(folder)
    raise DataError(
        f"{folder}: no tokenizer in this directory (looked for tokenizer.json, tokenizer.model, tokenizer_config.json)"
    )


def _load_json(path: Path) -> Tokenizer:
    data = _read(path)
    try:
        with _telling_panics(str(path)):
            backend = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise DataError(f"{path}: not a `tokenizers` JSON file ({_first_line(error)}): {_WAY_OUT}") from error
    named = _configured_tokens(path.with_name("tokenizer_config.json"))
    return JsonTokenizer(backend, named.get("eos"), str(path), named=named)


def _load_transformers(folder: Path) -> Tokenizer:
    # Imported here because it takes seconds, and only directories without a tokenizer.json need it.
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DataError(
            f"{folder}: a tokenizer without a tokenizer.json is read with transformers, which is not installed: "
            "pip install transformers, or use a tokenizer.json"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # anything from KeyError to a converter's ImportError, depending on the files
        message = f"{folder}: transformers cannot load this tokenizer ({_first_line(error)})"
        if not (folder / "tokenizer_config.json").exists():
            message += f": add a tokenizer_config.json that names its class, for example {_GPT2_CLASS}"
        raise DataError(message) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError(
            f"{folder}: this tokenizer has no fast version: convert it to a tokenizer.json with transformers first"
        )
    named = {role: token for role in ("bos", *ROLES) if (token := getattr(tokenizer, f"{role}_token", None))}
    return JsonTokenizer(backend, tokenizer.eos_token or tokenizer.sep_token, str(folder), named=named)


def refuse_other_kind(directory: str | Path, kind: str) -> None:
    """Refuse to save a tokenizer where files of another kind are, which would be loaded instead of it or beside it.
    Raises DataError where the directory is a file, or holds the other kind of tokenizer."""
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file: give a directory")
    other = "tokenizer.json" if kind in ("unigram", "sentencepiece-bpe") else "tokenizer.model"
    if (folder / other).exists():
        raise DataError(f"{folder} holds another tokenizer's {other}: give another directory, or remove it first")


def refuse_replacing(directory: str | Path, tokenizer: Tokenizer) -> None:
    """Refuse to save a tokenizer over another one: datasets and checkpoints made with that would lose their meaning.
    Raises DataError where the directory holds a tokenizer that is not the same, or cannot be read."""
    if not any(path.exists() for path in saved_files(directory)):
        return
    if load_tokenizer(directory).fingerprint != tokenizer.fingerprint:
        raise DataError(f"{directory} holds another tokenizer: give another directory, or replace it with --overwrite")


def saved_files(directory: str | Path) -> list[Path]:
    """Every file that saving a tokenizer of any kind may replace."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return [Path(directory) / name for name in names]


def _read(path: Path) -> bytes:
    try:
        data = read_bounded(path, _MOST_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot read the tokenizer ({error.strerror})") from error
    if not data:
        raise DataError(f"{path}: the tokenizer file is empty")
    return data


def _configured_tokens(path: Path) -> dict[str, str]:
    """The tokens that a tokenizer_config.json beside the tokenizer names, by what they are for (`eos`, `cls`, ...)."""
    config, named = _json_object(path), {}
    for use in ("bos", "eos", *ROLES):
        token = config.get(f"{use}_token")
        if isinstance(token, dict):  # older transformers wrote an AddedToken's fields
            token = token.get("content")
        if isinstance(token, str):
            named[use] = token
    return named


def _added_tokens(folder: Path) -> set[str]:
    """The tokens that a directory of transformers adds to its tokenizer's model, where its files list them."""
    added: set[str] = set()
    for name in ("tokenizer_config.json", "added_tokens.json"):
        listed = _json_object(folder / name)
        if name == "added_tokens.json":
            added |= listed.keys()
        elif isinstance(decoder := listed.get("added_tokens_decoder"), dict):
            added |= {str(token.get("content")) for token in decoder.values() if isinstance(token, dict)}
    return added


def _json_object(path: Path) -> dict[str, Any]:
    """A JSON file beside a tokenizer; empty where there is none, or no object in it."""
    if not path.exists():
        return {}
    try:
        values = parse_json(_read(path), unique=False)
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({_first_line(error)})") from error
    return values if isinstance(values, dict) else {}


@contextmanager
def _telling_panics(source: str) -> Iterator[None]:
    """Refuse a tokenizer on which `tokenizers` gives up: what it raises then is no Exception, and its class has no name
    to import."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{source}: `tokenizers` gives up on a text ({_first_line(error)}): simplify the regular expressions of "
            "this tokenizer, or use another one"
        ) from None


def _require_growth(longer: float, source: str) -> None:
    """Refuse a tokenizer that may make a text so many times as long."""
    if longer > _MOST_GROWTH:
        raise DataError(
            f"{source}: its replacements may make a text {longer:,.0f} times as long, more than {_MOST_GROWTH} times: "
            "shorten what its normalizer or decoder writes"
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
