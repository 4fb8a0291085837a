"""A checkpoint as a model of lm-evaluation-harness (the package lm_eval), which asks it the questions of benchmarks.
Importing this module registers the model type `megacore`. Only lm_eval needs it: nothing else of megacore imports
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from megacore.config.training import MAX_SEED
from megacore.inference.generate import Sampling
from megacore.inference.scoring import TextScorer


@register_model("megacore")
class MegacoreLM(LM):
    """A causal model of megacore, in one process.

    Args:
        checkpoint: a step_NNNNNNNN directory, or the output directory of a run, for its newest checkpoint.
        tokenizer: path; None: that of the checkpoint.
        program: the Python file that trained the model, if it has layers or registered names of its own.
        device: auto, cpu, cuda or another accelerator; None: auto.
        batch_size: texts computed at once; only those of one length are.
        max_length: tokens that the model reads at once; None: its positions.
        max_gen_toks: tokens that a generation has at most, where the task does not say.
        add_bos_token: whether each context begins with the tokenizer's first token.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        tokenizer: str | None = None,
        program: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool = False,
        seed: int = 1234,
        **further: Any,
    ) -> None:
        super().__init__()
        unknown = {name: value for name, value in further.items() if name != "max_batch_size" and value is not None}
        if unknown:
            raise ValueError(f"megacore's model has no argument {', '.join(unknown)}")
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"seed {seed} must be from 0 to {MAX_SEED}")
        size = int(str(batch_size)) if str(batch_size).isdigit() else 8  # lm_eval also has `auto`
        self.scorer = TextScorer.of_checkpoint(
            checkpoint,
            tokenizer=tokenizer,
            program=program,
            device=device or "auto",
            batch_size=max(1, size),
            length=max_length,
            begin_with_bos=add_bos_token,
        )
        self._max_gen_toks, self._seed = max_gen_toks, seed

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log P(continuation | context) of each request, and whether greedy decoding gives the continuation."""
        found = self.scorer.log_likelihoods([(str(r.args[0]), str(r.args[1])) for r in requests])
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log P of each whole text."""
        found = self.scorer.rolling([str(r.args[0]) for r in requests])
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to one of its `until`."""
        found = []
        for request in requests:
            context, settings = str(request.args[0]), dict(request.args[1])
            answer = self._generation(context, settings)
            self.cache_hook.add_partial("generate_until", request.args, answer)
            found.append(answer)
        return found

    def _generation(self, context: str, settings: dict[str, Any]) -> str:
        until: str | Sequence[str] = settings.get("until") or []
        sampled = settings.get("do_sample", settings.get("temperature", 0.0) > 0.0)
        sampling = Sampling(
            temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0,
            top_k=int(settings.get("top_k", 0)),
            top_p=float(settings.get("top_p", 1.0)),
            repetition_penalty=float(settings.get("repetition_penalty", 1.0)),
            seed=self._seed,
        )
        most = int(settings.get("max_gen_toks", settings.get("max_new_tokens", self._max_gen_toks)))
        return self.scorer.continuation(
            context, until=[until] if isinstance(until, str) else list(until), most=most, sampling=sampling
        )
