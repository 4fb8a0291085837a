"""Probabilities that a trained causal model gives to tokens and texts, in one process: perplexity, and what benchmarks
of language models ask for (lm-evaluation-harness, Gao et al.)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from megacore.config import ResolvedModel
from megacore.data.tokenizers.tokenizer import Tokenizer
from megacore.errors import CheckpointError, UserError
from megacore.inference.generate import Sampling, generate
from megacore.inference.trained import causal_model
from megacore.pipeline.stage import Stage
from megacore.remote import usable


@dataclass(frozen=True, kw_only=True)
class Window:
    """Tokens that the model reads and predicts at once."""

    tokens: Sequence[int]  # that it reads, and the last one
    predicted: int  # how many of them, at the end, it predicts


def windows(tokens: Sequence[int], first: int, *, length: int, stride: int) -> Iterator[Window]:
    """Divide a sequence into windows of `length` that predict each token from number `first` (at least 1: nothing
    predicts the first token) on once. Each but the first predicts `stride` tokens; fewer give each token more context,
    and take longer."""
    assert first >= 1 and 1 <= stride <= length
    while first < len(tokens):
        stop = min(len(tokens), max(first + stride, length + 1))
        yield Window(tokens=tokens[max(0, stop - 1 - length) : stop], predicted=stop - first)
        first = stop


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the model says of the predicted tokens of a window."""

    log_probabilities: Tensor  # fp64 [n], in nats
    greedy: bool  # whether each of them is the likeliest token


class Scorer:
    """A whole model on one device. `batch_size`: windows computed at once; only windows of one length are, so that
    nothing is padded."""

    def __init__(self, stage: Stage, config: ResolvedModel, *, batch_size: int = 8) -> None:
        self.stage, self.config, self._batch_size = stage.eval(), config, batch_size
        self._device = next(stage.parameters()).device

    @torch.no_grad()
    def score(self, of: Sequence[Window]) -> list[Scores]:
        """The scores of each window, in their order. Raises CheckpointError where the model's output is not finite."""
        results: dict[int, Scores] = {}
        order = sorted(range(len(of)), key=lambda number: -len(of[number].tokens))  # the largest first: it fits, or not
        for _, equal in groupby(order, key=lambda number: len(of[number].tokens)):
            numbers = list(equal)
            for start in range(0, len(numbers), self._batch_size):
                batch = numbers[start : start + self._batch_size]
                results |= zip(batch, self._scores([of[number] for number in batch]), strict=True)
        return [results[number] for number in range(len(of))]

    def _scores(self, batch: Sequence[Window]) -> Iterator[Scores]:
        tokens = torch.tensor([list(window.tokens) for window in batch], device=self._device)
        output = self.stage(tokens[:, :-1])
        logits: Tensor = (output if isinstance(output, Tensor) else output[0])[..., : self.config.vocab_size]
        for window, row, ids in zip(batch, logits, tokens, strict=True):
            rows, targets = row[-window.predicted :].double(), ids[-window.predicted :]
            found = rows.log_softmax(-1).gather(-1, targets[:, None])[:, 0].cpu()
            if not found.isfinite().all():
                raise CheckpointError(
                    "the model's output is not finite (NaN or infinite), because weights of the checkpoint are not, or "
                    "because they overflow: use a checkpoint of an earlier step"
                )
            yield Scores(log_probabilities=found, greedy=bool((rows.argmax(-1) == targets).all()))


@dataclass(frozen=True, kw_only=True)
class Surprise:
    """How unlikely a model finds a text."""

    nats: float = 0.0  # negative log-likelihood, summed
    tokens: int = 0
    bytes: int = 0  # of the text as UTF-8; 0: unknown
    documents: int = 0

    def __add__(self, other: Surprise) -> Surprise:
        return Surprise(
            nats=self.nats + other.nats,
            tokens=self.tokens + other.tokens,
            bytes=self.bytes + other.bytes,
            documents=self.documents + other.documents,
        )

    @property
    def perplexity(self) -> float | None:
        """exp(nats per token); None where no token was predicted."""
        per_token = self.nats / self.tokens if self.tokens else None
        return None if per_token is None else math.exp(per_token) if per_token < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, which does not depend on the tokenizer; None without bytes."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


def surprises(
    scorer: Scorer,
    documents: Iterable[tuple[Sequence[int], int]],
    *,
    prefix: int | None,
    length: int,
    stride: int,
    at_once: int = 256,
) -> Iterator[Surprise]:
    """The surprise of each document, (tokens, bytes of the text), read by itself. `prefix`: a token that every document
    begins with, which is not predicted; None: its first token is not. `at_once`: documents whose windows are batched
    together."""
    first = [] if prefix is None else [prefix]
    pending: list[tuple[list[Window], int]] = []

    def results() -> Iterator[Surprise]:
        scores = iter(scorer.score([window for made, _ in pending for window in made]))
        for made, size in pending:
            sums = [float(next(scores).log_probabilities.sum()) for _ in made]
            predicted = sum(window.predicted for window in made)
            yield Surprise(nats=-math.fsum(sums), tokens=predicted, bytes=size, documents=1)
        pending.clear()

    for tokens, size in documents:
        pending.append((list(windows([*first, *tokens], 1, length=length, stride=stride)), size))
        if len(pending) == at_once:
            yield from results()
    yield from results()


class TextScorer:
    """Texts and their continuations, as benchmarks ask for them. `length`: tokens that the model reads at once; None:
    its positions. Raises UserError where no token begins a text or ends a document, or `length` is too large."""

    def __init__(
        self, scorer: Scorer, tokenizer: Tokenizer, *, length: int | None = None, begin_with_bos: bool = False
    ) -> None:
        self.scorer, self.tokenizer = scorer, tokenizer
        self.length = context_of(length, scorer.config)
        prefix = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
        if prefix is None:
            raise UserError("the tokenizer has no token that begins a text, and none that ends one: use another one")
        self.prefix = prefix
        self._begin = [prefix] if begin_with_bos else []

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: str | Path,
        *,
        tokenizer: str | None = None,
        program: str | None = None,
        device: str = "auto",
        batch_size: int = 8,
        length: int | None = None,
        begin_with_bos: bool = False,
    ) -> TextScorer:
        """A scorer of a checkpoint of any layout, or of a run's newest. `tokenizer`: path; None: the checkpoint's.
        `program`: as for `causal_model`. `device`: auto, cpu, cuda or another accelerator. Raises UserError where it
        cannot be used so."""
        found = causal_model(usable(str(checkpoint)), tokenizer, program)
        scorer = Scorer(found.stage(device), found.config, batch_size=batch_size)
        return cls(scorer, found.tokenizer, length=length, begin_with_bos=begin_with_bos)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of a context and of its continuation, as those of the whole text are divided; spaces between them
        belong to the continuation."""
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        if not context:
            return [self.prefix], self.tokenizer.encode(continuation)
        whole, before = self.tokenizer.encode(context + continuation), self.tokenizer.encode(context)
        return [*self._begin, *before], whole[len(before) :]

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """log P(continuation | context) of each pair, in nats, and whether greedy decoding would give it."""
        return self._sums([self.encode_pair(*pair) for pair in pairs])

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """log P(text) of each text, in nats; a long one is read in pieces of `length` tokens."""
        return [found for found, _ in self._sums([([self.prefix], self.tokenizer.encode(text)) for text in texts])]

    def continuation(self, context: str, *, until: Sequence[str], most: int, sampling: Sampling) -> str:
        """What the model writes after a context, up to the first of the texts `until`. `until`: texts that end it, and
        are left out."""
        prompt = [*self._begin, *self.tokenizer.encode(context)] or [self.prefix]
        prompt, text, tokens = prompt[-max(1, self.length - most) :], "", list[int]()
        for token in generate(self.scorer.stage, self.scorer.config, prompt, max_new_tokens=most, sampling=sampling):
            if token == self.tokenizer.eod:
                break
            tokens.append(token)
            text = self.tokenizer.decode([*prompt, *tokens])[len(self.tokenizer.decode(prompt)) :]
            if any(end in text for end in until):
                break
        return text[: min((text.index(end) for end in until if end in text), default=len(text))]

    def _sums(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        made = [
            list(windows([*before, *after], len(before), length=self.length, stride=self.length))
            for before, after in pairs
        ]
        scores = iter(self.scorer.score([window for each in made for window in each]))
        found = [[next(scores) for _ in each] for each in made]
        return [
            (math.fsum(float(score.log_probabilities.sum()) for score in each), all(score.greedy for score in each))
            for each in found
        ]


def context_of(length: int | None, config: ResolvedModel) -> int:
    """How many tokens the model reads at once. Raises UserError where it has more than positions."""
    positions = config.max_position_embeddings
    if length is not None and length > positions:
        raise UserError(
            f"a context of {length} tokens is more than the model's {positions} positions: use {positions} or less"
        )
    return positions if length is None else length
