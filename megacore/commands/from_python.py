"""Training that a Python program asks for with keywords: the flags, errors and code of `pretrain_gpt.py`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.commands.pretrain_gpt import read_config, train
from megacore.config.flags import all_fields
from megacore.errors import ConfigError
from megacore.models.spec import DescribesLayers
from megacore.parallel.products import Products
from megacore.train.callbacks import Callback, Run
from megacore.train.launch import Job
from megacore.train.peers import HANDLED
from megacore.train.starting import set_torch_defaults
from megacore.train.trainer import Trainer
from megacore.train.watchdog import watchdog

Setting = bool | int | float | str | Path | Sequence[str] | None


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """What a training leaves behind; its files are in the output directory."""

    trainer: Trainer  # with the model, `trainer.model`, and its parameters, `trainer.parameters`
    # Of logged steps and of evaluations, in order: the lines of metrics.jsonl, on every rank.
    records: Sequence[Mapping[str, Any]]

    @property
    def losses(self) -> list[float]:
        """The loss of each logged step (`log_interval`)."""
        return [record["train/loss"] for record in self.records if "train/loss" in record]


def pretrain_gpt(
    *,
    callbacks: Sequence[Callback] = (),
    products: Products | None = None,
    layers: DescribesLayers | None = None,
    **settings: Setting,
) -> Pretrained:
    """Pretrain a GPT, on one process or, under torchrun, on all of them; each calls this.

        run = pretrain_gpt(preset="gpt2-tiny", mock_data=True, global_batch_size=8, train_iters=10, log_interval=1)
        print(run.losses)

    `settings`: the flags of `pretrain_gpt.py`, with underscores: `tp=2` is --tp 2, `mock_data=True` is --mock-data.
    Raises ConfigError (a ValueError) with everything that is wrong with them; TrainingStopped where the run diverges.
    """
    return pretrained(_words(settings), callbacks=callbacks, products=products, layers=layers)


def pretrained(
    words: Sequence[str],
    *,
    callbacks: Sequence[Callback] = (),
    products: Products | None = None,
    layers: DescribesLayers | None = None,
) -> Pretrained:
    """`pretrain_gpt` with the words of a command line."""
    config = read_config(words, prog="pretrain_gpt.py", exits=False)
    if config.watch.survive:
        raise ConfigError(["survive keeps the processes of a program: use python pretrain_gpt.py --survive"])
    set_torch_defaults()
    kept, job = _Records(), Job()
    with _signal_handlers_kept():
        try:
            trainer = job.run(
                config,
                lambda config, mesh: train(
                    config, mesh, callbacks=[kept, *callbacks], products=products, layers=layers
                ),
            )
        finally:  # the process goes on, and is no longer that of a run
            if job.watch is not None:
                job.watch.stop()
            watchdog().end()
    return Pretrained(trainer=trainer, records=kept.records)


class _Records(Callback):
    """Keeps what is logged. After a rollback the steps that it takes back are there twice, as in metrics.jsonl."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def on_log(self, run: Run, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    on_evaluate = on_log


def _words(settings: Mapping[str, Setting]) -> list[str]:
    """The command line that says the same. Raises ConfigError with values that no flag can have, or keywords that are
    no setting of a run."""
    words, problems = list[str](), list[str]()
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if name in ("help", "version", "dry_run"):
            problems.append(f"{name} is not for Python: use python pretrain_gpt.py {flag}")
        # Before the numbers: a bool is an int to Python.
        elif isinstance(value, bool):
            words.append(flag if value or name not in all_fields() else f"--no-{flag[2:]}")
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        elif value is None or isinstance(value, (int, float, str, Path)):
            # With =, so that a text that begins with a dash is no flag.
            words.append(f"{flag}={value}")
        else:
            problems.append(f"{name} is a {type(value).__name__}: give a number, a string, a bool or a list of strings")
    if problems:
        raise ConfigError(problems)
    return words


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """A training handles signals until it ends; afterwards the program's own handlers do."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
