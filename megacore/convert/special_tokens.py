"""The ids of special tokens in a config.json that is made anew: those of the tokenizer that goes with it. A field that
the file leaves out takes the default of its family, an id of the tokenizer that the family was made with. In another
vocabulary that is any token, or none: every field is therefore written, null where there is no such token."""

from __future__ import annotations

from typing import Any

from megacore.data.tokenizers.tokenizer import Tokenizer

_BERT_ROLES = ("cls", "sep", "mask")


def special_ids(tokenizer: Tokenizer | None, vocab_size: int, *, bert: bool) -> dict[str, int | None]:
    """The fields of config.json: ids below `vocab_size`; `bert`: with the tokens that only a BERT has."""
    ids: dict[str, int | None] = dict.fromkeys(("bos", "eos", "pad", *(_BERT_ROLES if bert else ())))
    if tokenizer is not None:
        ids |= {"bos": tokenizer.bos, "eos": tokenizer.eod}
        ids |= {role: id for role, id in tokenizer.roles.items() if role in ids}
    return {f"{name}_token_id": id if id is not None and id < vocab_size else None for name, id in ids.items()}


def generation_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """A generation_config.json with a config.json's ids: where generated text ends; None where nothing says it."""
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    known = {name: id for name, id in ids.items() if id is not None}
    return {"_from_model_config": True, **known} if "eos_token_id" in known else None
