"""Write texts and conversations that every machine makes alike: `text.py FILE.jsonl`, and FILE.chat.jsonl beside it."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

WORDS = [
    "the", "of", "a", "model", "rank;", "Über", "naïve", "東京", "tokens\tand", "12,345", "Why?", "It", "isn't",
    "bits!",
]  # fmt: skip


def main(path: Path) -> None:
    draw = random.Random(7)
    texts = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 60))) for _ in range(300)]
    texts += [texts[3], "", "one\n\ntwo"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    chats = [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": other}]}
        for one, other in zip(texts[:40], texts[40:80], strict=True)
    ]
    path.with_suffix(".chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
