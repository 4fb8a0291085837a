"""From JSON lines to conversations, or prompts with their completions, and what is wrong with a line.

A line is an object with `messages`, a list of objects with `role` and `content`, or with `prompt` and `completion`,
each a text.
"""

from __future__ import annotations

from typing import Any

from megacore.data.indexed.corpus import Chunk
from megacore.data.indexed.documents import BadLine, json_record, require_text
from megacore.data.tokenizers.chat_template import Message, Passage, Template
from megacore.errors import DataError

KEYS = "`messages`, or `prompt` and `completion`"


def rendered_lines(chunk: Chunk, template: Template) -> tuple[list[list[Passage]], list[BadLine]]:
    """The passages of each line of a chunk, and the lines that hold none.

    Args:
        chunk: of JSON lines.
        template: renders messages.

    Raises:
        DataError: the template cannot be used at all.
    """
    rendered, bad = [], []
    for number, line in enumerate(chunk.data.split(b"\n"), chunk.first_line):
        if not line or line.isspace():
            continue
        try:
            rendered.append(_rendered(json_record(line), template))
        except DataError as error:
            raise DataError(f"{chunk.source}:{number}: {error}") from error
        except ValueError as error:
            bad.append(BadLine(chunk.source, number, str(error)))
    return rendered, bad


def _rendered(record: dict[str, Any], template: Template) -> list[Passage]:
    """The passages of one line; ValueError says what is wrong with it."""
    if "messages" in record:
        return template.render(_messages(record["messages"]))
    missing = [key for key in ("prompt", "completion") if key not in record]
    if missing:
        raise ValueError(
            f"no key {' and no key '.join(map(repr, missing))}: a line has {KEYS} "
            f"(it has {', '.join(map(repr, list(record)[:5])) or 'none'})"
        )
    prompt, completion = (require_text(record[key], f"key {key!r}") for key in ("prompt", "completion"))
    if not completion:
        raise ValueError("key 'completion' is empty: there is nothing to predict")
    text = prompt + completion
    return [Passage(text=text, predicted=((len(prompt), len(text)),), ends=True)]


def _messages(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("key 'messages' is not a list of messages, or is empty")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is not an object but {type(message).__name__}")
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(f"message {number} has no {key!r}")
            require_text(message[key], f"{key!r} of message {number}")
    if not any(message["role"] == "assistant" and message["content"] for message in messages):
        raise ValueError("no message of the role 'assistant' has content: there is nothing to predict")
    return messages
