"""From a conversation to text, and which characters of it a model is to predict: the replies of the assistant. A
template is the tokenizer's, which transformers renders in a sandbox and in a process with limits, or a plain one of
lines <|user|>, <|assistant|> and an end-of-document token after each reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from megacore.data.tokenizers.bounded import Bounded, LimitExceeded
from megacore.data.tokenizers.tokenizer import Tokenizer
from megacore.errors import DataError
from megacore.safe_json import read_json

ChatTemplate = Literal["auto", "tokenizer", "plain"]
Message = Mapping[str, Any]
_PLAIN_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Text that is tokenized at once."""

    text: str  # of the passage
    predicted: tuple[tuple[int, int], ...] = ()  # ranges of characters that a model is to predict, ascending
    ends: bool = False  # whether the end-of-document token follows, which is predicted too


class Template(Protocol):
    """Renders conversations."""

    def render(self, messages: Sequence[Message]) -> list[Passage]:
        """The passages of a conversation, with the replies of the assistant marked. Raises ValueError where the
        conversation cannot be rendered; the message says why; DataError where the template cannot be used at all."""


class PlainTemplate:
    """Role names in angle brackets, each on a line; the end-of-document token after each reply."""

    def render(self, messages: Sequence[Message]) -> list[Passage]:
        passages, text = [], ""
        for message in messages:
            role, content = message["role"], message["content"]
            if role not in _PLAIN_ROLES:
                raise ValueError(
                    f"the role {role!r} is unknown to --chat-template plain, which has {', '.join(_PLAIN_ROLES)}"
                )
            text += f"<|{role}|>\n"
            begin, text = len(text), text + content
            if role == "assistant":
                passages.append(Passage(text=text, predicted=((begin, len(text)),), ends=True))
                text = ""
            text += "\n"
        return passages


class TokenizerTemplate:
    """The chat template of a tokenizer's directory. A reply is what the template adds to the text when the reply is
    added to the messages before it, after its header: its end marker belongs to it. Raises DataError where transformers
    or jinja2 is missing, the tokenizer cannot be loaded, or its template takes too much time or memory."""

    def __init__(self, directory: Path) -> None:
        missing = [name for name in ("transformers", "jinja2") if find_spec(name) is None]
        if missing:
            raise DataError(
                f"--chat-template: the template of {directory} is rendered with {' and '.join(missing)}, not installed "
                f"here: pip install {' '.join(missing)}, or use --chat-template plain"
            )
        # Imported here because it takes seconds, and only this template needs it.
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # anything, depending on the files
            raise DataError(f"{directory}: transformers cannot load this tokenizer ({error})") from error
        self._directory = directory
        self._rendering = Bounded(_Rendering(tokenizer).passages)
        try:
            # A template that takes too long is refused now, not after the first gigabytes of a corpus.
            self.render([{"role": "user", "content": "a"}])
        except DataError:
            raise
        except ValueError:
            pass  # a template may refuse this conversation

    def render(self, messages: Sequence[Message]) -> list[Passage]:
        try:
            return self._rendering(list(messages))
        except LimitExceeded as error:
            raise DataError(
                f"the chat template of {self._directory} {error}: use --chat-template plain, or correct it"
            ) from error


class _Rendering:
    """The chat template of a tokenizer of transformers at work."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def passages(self, messages: list[Message]) -> list[Passage]:
        try:
            text = self._rendered(messages)
            predicted = []
            for number, message in enumerate(messages):
                if message["role"] == "assistant":
                    before = self._rendered(messages[:number], reply=True) if number else self._header(message)
                    after = self._rendered(messages[: number + 1])
                    if not text.startswith(before) or not text.startswith(after):
                        raise ValueError(
                            f"the chat template changes what precedes or ends message {number + 1} when later ones "
                            "follow, so that the reply cannot be told from the rest: use --chat-template plain, or a "
                            "template that renders turn by turn"
                        )
                    if not _holds(text[len(before) : len(after)], message["content"]):
                        raise ValueError(
                            f"the chat template leaves out the reply of message {number + 1}, or changes it: there "
                            "would be nothing to learn from it; use --chat-template plain, or a template that renders "
                            "the content of the role 'assistant'"
                        )
                    predicted.append((len(before), len(after)))
        except (ValueError, MemoryError):
            raise
        except Exception as error:  # whatever the template raises, such as an order of roles that it does not know
            raise ValueError(f"the chat template refuses it ({str(error).strip()[:200]})") from error
        return [Passage(text=text, predicted=tuple(predicted))]

    def _header(self, first: Message) -> str:
        """The header of a reply that begins a conversation: templates render no conversation without a message."""
        return self._rendered([first], reply=True).removeprefix(self._rendered([first]))

    def _rendered(self, messages: Sequence[Message], *, reply: bool = False) -> str:
        """The text of messages, with the header of a reply."""
        text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply)
        return text


def _holds(rendered: str, content: str) -> bool:
    """Whether a reply is not empty, and has its content; templates may change white space."""
    return bool(rendered) and "".join(content.split()) in "".join(rendered.split())


def has_chat_template(path: str | Path) -> bool:
    """Whether the directory of a tokenizer has a chat template that transformers knows."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if (folder / "chat_template.jinja").exists():
        return True
    try:
        config = read_json(folder / "tokenizer_config.json", 1 << 28, unique=False)
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def load_template(path: str | Path, choice: ChatTemplate, tokenizer: Tokenizer) -> Template:
    """The template of a choice. `choice`: auto: the tokenizer's if it has one, else the plain one. Raises DataError
    where there is no such template, or the tokenizer has no token that ends a reply."""
    known = has_chat_template(path)
    if choice == "tokenizer" and not known:
        raise DataError(
            f"--chat-template tokenizer: {path} has none (looked for chat_template.jinja, and chat_template in "
            "tokenizer_config.json): use --chat-template plain, or leave it out"
        )
    if choice != "plain" and known:
        return TokenizerTemplate(Path(path) if Path(path).is_dir() else Path(path).parent)
    if tokenizer.eod is None:
        raise DataError(
            f"--chat-template plain ends replies with the end-of-document token, which the tokenizer {path} does not "
            "have: use a tokenizer with a chat template or with such a token"
        )
    return PlainTemplate()


def encode_passage(tokenizer: Tokenizer, passage: Passage) -> tuple[list[int], list[int]]:
    """The token ids of a passage, and for each 1 where it is predicted. The passage is tokenized at once. A range
    begins with the first token that is not there when the text before it is tokenized by itself, as a prompt is, and
    ends likewise."""
    bounds = [at for span in passage.predicted for at in span if at < len(passage.text)]
    ids, *prefixes = tokenizer.encode_batch([passage.text, *(passage.text[:at] for at in bounds)])
    begins = {at: _common(ids, prefix) for at, prefix in zip(bounds, prefixes, strict=True)}
    mask = [0] * len(ids)
    for begin, end in passage.predicted:
        first, stop = begins.get(begin, len(ids)), begins.get(end, len(ids))
        mask[first:stop] = [1] * (stop - first)
    if passage.ends and tokenizer.eod is not None:
        ids, mask = [*ids, tokenizer.eod], [*mask, 1]
    return ids, mask


def _common(ids: list[int], prefix: list[int]) -> int:
    """How many tokens both begin with."""
    if ids[: len(prefix)] == prefix:
        return len(prefix)
    return next(at for at, (one, other) in enumerate(zip(ids, prefix, strict=False)) if one != other)
