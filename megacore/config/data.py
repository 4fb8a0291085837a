"""The section of the training data: datasets and their shares, tokenizer, samples, packing, loading."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

from megacore.config.fields import Flag, Range, Section, field_infos
from megacore.config.numbers import parse_float
from megacore.config.rules import Needs, Readable, Rule, Settings, rows
from megacore.config.spelling import OWNERS

FILL_IN_FIELDS = ("fim_rate", *(field for field, (owner, _) in OWNERS.items() if owner == "fim_rate"))
"""The fields of fill-in-the-middle."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_EXAMPLE = "--valid-sets wiki=data/wiki_text_document code=data/code_text_document"


class SplitShares(NamedTuple):
    """The shares of training, validation and test, which sum to 1."""

    train: float
    valid: float
    test: float


def _sets(c: Settings) -> Iterator[str]:
    """What is wrong with the words of --valid-sets."""
    for word in c.valid_sets:
        name, equals, prefix = word.partition("=")
        if not equals or not prefix.strip():
            yield f"--valid-sets {word} is not NAME=PREFIX: use, for example, {_EXAMPLE}"
        elif not _NAME.fullmatch(name):
            yield (
                f"--valid-sets {word}: the name {name!r} becomes part of a metric's name, and must be 1 to 64 letters, "
                f"digits, '_', '.' or '-', the first a letter or digit: use, for example, {_EXAMPLE}"
            )
    names = Counter(word.partition("=")[0] for word in c.valid_sets if "=" in word)
    for name, count in names.items():
        if count > 1:
            yield f"--valid-sets has the name {name} {count} times: give each set its own name"


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The training data, its split, and how it is loaded."""

    rules: ClassVar[Sequence[Rule]] = (
        Readable("prefixes", "split_shares"),
        *rows("data"),
        _sets,
    )

    data_path: Annotated[tuple[str, ...], Flag(metavar="PREFIX...")] = ()
    """Prefix of the preprocessed dataset (PREFIX.bin, PREFIX.idx). Several are blended by their numbers of tokens, or
    as WEIGHT PREFIX WEIGHT PREFIX. A URL is downloaded once per node (docs/guides/data.md)."""
    train_data_path: Annotated[tuple[str, ...], Flag(metavar="PREFIX...")] = ()
    """Training data instead of --data-path, in the same notation, without --split."""
    valid_data_path: Annotated[tuple[str, ...], Flag(metavar="PREFIX...")] = ()
    """Validation data for --train-data-path. Without it only --valid-sets are evaluated."""
    valid_sets: Annotated[tuple[str, ...], Flag(metavar="NAME=PREFIX...")] = ()
    """Additional validation sets, without --split. Every evaluation reads --eval-iters batches of each and reports
    eval/NAME/loss."""
    split: Annotated[str, Flag(metavar="A,B,C")] = "949,50,1"
    """Shares of the documents for training, validation and test, in any unit."""
    sample_order: Literal["megacore", "megatron"] = "megacore"
    """Order of samples. megacore: a longer run continues the order of a shorter one. megatron: Megatron-LM's, which
    depends on the run's number of samples."""
    tokenizer: Annotated[
        str | None, Flag(("--tokenizer-model", "--vocab-file", "--tokenizer-name-or-path"), metavar="PATH")
    ] = None
    """The tokenizer: a tokenizer.json, a directory that contains one, or a SentencePiece .model file. Default: no
    tokenizer; --vocab-size must be given."""
    merge_file: Annotated[str | None, Flag(metavar="FILE")] = None
    """GPT-2's merges.txt, where --tokenizer is GPT-2's vocab.json. Default: the file beside vocab.json whose name has
    merges.txt instead."""
    seq_length: Annotated[int, Range(1, 100_000_000)] = 1024
    """Tokens in each sample."""
    mock_data: bool = False
    """Trains on generated tokens instead of a dataset. Needs --vocab-size or --tokenizer."""
    num_workers: Annotated[int, Range(0, 64)] = 0
    """Processes per rank that prepare batches in advance. 0: the training process prepares them."""
    data_cache_path: Annotated[str | None, Flag(metavar="DIR")] = None
    """Directory of the cached sample indices, and of copies of datasets that are URLs. Default: a directory cache
    beside each dataset; copies are in ~/.cache/megacore."""
    packing: Literal["none", "concat", "best-fit"] = "concat"
    """How documents become samples. concat: one stream is cut into samples. none: one document each, padded or cut.
    best-fit: whole documents with little padding; one longer than --seq-length is split."""
    reset_position_ids: Annotated[bool | None, Needs(packing=("concat", "best-fit"))] = None
    """Restarts positions at each document of a sample. Default: on with --packing best-fit, off with concat."""
    reset_attention_mask: Annotated[bool | None, Needs(packing=("concat", "best-fit"))] = None
    """Restricts attention to the document of each token. Default: on with --packing best-fit, off with concat."""
    eod_mask_loss: bool = False
    """Excludes the loss at end-of-document tokens of the input, and at the last token of each document. Needs
    --tokenizer."""
    fim_rate: Annotated[float, Range(0, 1), Flag(example=0.5)] = 0.0
    """Fill-in-the-middle: share of the training documents that are cut into prefix, middle and suffix, with the middle
    at the end. Needs a --tokenizer with three tokens that mark the parts."""
    fim_spm_rate: Annotated[float, Range(0, 1)] = 0.5
    """Share of these documents in the order suffix, prefix, middle, not prefix, suffix, middle."""
    fim_cut: Literal["character", "token"] = "character"
    """Where --fim-rate cuts. character: anywhere, and the parts are tokenized again. token: between tokens, as it
    always does in datasets with a loss mask and documents that decoding does not restore."""
    fim_prefix_token: Annotated[str | None, Flag(metavar="TOKEN")] = None
    """The token before the prefix. Default: that of the first known set in the vocabulary: of StarCoder, SantaCoder,
    Qwen2.5-Coder, Code Llama, DeepSeek-Coder, Codestral."""
    fim_middle_token: Annotated[str | None, Flag(metavar="TOKEN")] = None
    """The token before the middle. Default: likewise."""
    fim_suffix_token: Annotated[str | None, Flag(metavar="TOKEN")] = None
    """The token before the suffix. Default: likewise."""

    @property
    def beside_tokens(self) -> tuple[str, ...]:
        """What the layers get beside the tokens: the documents, where attention stays within each, and the
        positions, where they restart. A sample of --packing none is one document, and causal attention sees no
        padding after it."""
        packed = self.packing == "best-fit"
        resets = {"documents": self.reset_attention_mask, "positions": self.reset_position_ids}
        if self.packing == "none":
            return ()
        return tuple(name for name, flag in resets.items() if (packed if flag is None else flag))

    @property
    def is_split(self) -> bool:
        """Whether training and validation data are separate datasets, which --split does not divide."""
        return bool(self.train_data_path)

    def without_fill_in(self) -> DataConfig:
        """The same without fill-in-the-middle."""
        infos = field_infos(DataConfig)
        return dataclasses.replace(self, **{name: infos[name].default for name in FILL_IN_FIELDS})

    def named_valid_sets(self) -> dict[str, str]:
        """The prefixes of --valid-sets by name; words that are refused are left out."""
        pairs = (word.partition("=") for word in self.valid_sets)
        return {name: prefix for name, _, prefix in pairs if _NAME.fullmatch(name) and prefix.strip()}

    def prefixes(self, *, named: bool = True) -> tuple[str, ...]:
        """Every dataset of the run, each once. Raises ValueError as by `blend`."""
        blended = [prefix for stream in (0, 1) for prefix in self.blend(stream)[0]]
        return tuple(dict.fromkeys([*blended, *(self.named_valid_sets().values() if named else ())]))

    def blend(self, stream: int = 0) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
        """The prefixes of a stream's datasets, and their weights or None. `stream`: 0 for training, 1 for validation.
        Raises ValueError where weights and prefixes do not alternate, or a weight is not a positive number, by itself
        or as a share of all."""
        name = ("train_data_path", "valid_data_path")[stream] if self.is_split else "data_path"
        path, flag = getattr(self, name), "--" + name.replace("_", "-")
        if len(path) < 2 or _as_number(path[0]) is None:
            return path, None
        weights = [_as_number(w) for w in path[::2]]
        if len(path) % 2 or None in weights:
            raise ValueError(
                f"{flag} {' '.join(path)} mixes weights and prefixes: "
                "use WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes only"
            )
        positive = tuple(w for w in weights if w is not None and math.isfinite(w) and w > 0)
        if len(positive) < len(weights):
            raise ValueError(
                f"{flag} {' '.join(path)} has a weight that is not a finite number above 0: "
                "leave that dataset out, or give it a positive weight, for example 1"
            )
        if not all(weight / sum(positive) for weight in positive):
            raise ValueError(
                f"{flag} {' '.join(path)} has weights whose sum or smallest share is beyond a double's range: "
                "only their ratios count, so use, for example, weights from 0.001 to 1000"
            )
        return path[1::2], positive

    def split_shares(self) -> SplitShares:
        """The shares of --split. Raises ValueError where --split is not one to three non-negative numbers, or its first
        number is 0."""
        numbers = [_as_number(part) for part in self.split.strip("'\"").split(",")]  # as a script may quote it
        shares = [s for s in numbers if s is not None and math.isfinite(s) and s >= 0]
        if len(shares) != len(numbers) or len(shares) > 3:
            raise ValueError(
                f"--split {self.split} must be one to three numbers of 0 or more, separated by commas: "
                "use, for example, 949,50,1"
            )
        if not shares[0] / (sum(shares) or 1.0):  # 0, or nothing beside another number or an infinite sum
            raise ValueError(
                f"--split {self.split} leaves nothing to train on, as its first number is no positive share: use, for "
                "example, 949,50,1"
            )
        return SplitShares(*(s / sum(shares) for s in [*shares, 0.0, 0.0][:3]))


def _as_number(text: str) -> float | None:
    try:
        return parse_float(text.strip())
    except ValueError:
        return None
