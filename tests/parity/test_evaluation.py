"""What an evaluation reports, against torch's own cross-entropy; with --valid-sets each set by itself, as a run that
has no other reports it; on every layout."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

from megacore.config import OptimizerConfig
from megacore.data.gpt.blend import NamedSets
from megacore.errors import ConfigError
from megacore.inference.generate import Sampling
from megacore.inference.scoring import TextScorer, windows
from megacore.parallel.host_memory import AvailableMemory
from megacore.parallel.mesh import Mesh, build_mesh
from megacore.plan import fit
from megacore.plan.memory import GIB
from megacore.train import step
from megacore.train.engine import Layer, PipelineEngine
from megacore.train.gpt_task import GPTTask
from megacore.train.trainer import Trainer
from tests.distributed import run_distributed
from tests.e2e.launching import words
from tests.matrix.programs import PROGRAMS
from tests.parity import runs
from tests.parity.bert_runs import RaggedPairs, make_bert_config, make_bert_trainer
from tests.parity.conversions import to_megacore, tokenizer
from tests.parity.hf_models import POSITIONS, make_model, save_model
from tests.parity.runs import VOCAB, Layout, RaggedData, gather, make_config, make_trainer, trainer_of
from tools.convert_checkpoint import main as convert
from tools.perplexity import main as perplexity
from tools.report import main as report

Changes = dict[str, Any]
STEPS, EVALUATED = 2, 2 * 8  # samples of an evaluation: two global batches


def evaluations(run: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, from its metrics."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "eval/loss" in record]


def test_an_evaluation_is_the_negative_log_likelihood_of_the_same_batches_every_time(tmp_path: Path) -> None:
    trainer = trainer_of((1, 1, 1), tmp_path, label_smoothing=0.2, z_loss=0.1, eval_iters=3, hidden_dropout=0.5)
    first = trainer.evaluate()
    total, tokens = 0.0, 0.0
    assert trainer.valid_batches is not None
    trainer.valid_batches.rewind()
    for microbatch in itertools.chain.from_iterable(itertools.islice(trainer.valid_batches, 3)):
        with torch.no_grad():
            logits = trainer.model.chunks[0].eval()(microbatch.tokens)[..., :VOCAB]
        losses = F.cross_entropy(logits.double().flatten(0, 1), microbatch.labels.flatten(), reduction="none")
        total += float((losses * microbatch.loss_mask.flatten()).sum())
        tokens += float(microbatch.loss_mask.sum())
    assert first == pytest.approx(total / tokens, rel=1e-6)
    assert trainer.evaluate() == first


@pytest.mark.parametrize("off", ["eval_interval", "eval_iters"])
def test_an_interval_or_a_length_of_0_is_no_evaluation(off: str, tmp_path: Path) -> None:
    trainer_of((1, 1, 1), tmp_path, **{"train_iters": 2, "eval_interval": 1, "eval_iters": 1, off: 0}).run()
    assert not evaluations(tmp_path)


# ---- several sets


class Later(RaggedData):
    """Other samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index + 1000)


def both() -> NamedSets:
    return NamedSets({"": RaggedData(EVALUATED), "code": Later(EVALUATED)})


def evaluating(directory: Path, data: Any, **changes: Any) -> Trainer:
    """A run of two steps, each of which an evaluation of `data` follows."""
    fixed = {"num_layers": 2, "train_iters": STEPS, "eval_interval": 1, "eval_iters": 2, "micro_batch_size": 1}
    config = make_config((1, 1, 1), directory, **{**fixed, **changes})
    mesh = build_mesh(config.parallel)
    return Trainer(config, mesh, GPTTask(config, mesh), RaggedData(64), data)


def losses(directory: Path) -> list[tuple[float, float]]:
    return [(record["eval/loss"], record["eval/code/loss"]) for record in evaluations(directory)]


def test_each_set_is_evaluated_as_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without training a checkpoint gives the loss of the evaluation with which the training ended, and nothing is
    saved; that the run is over already is no obstacle."""
    evaluating(tmp_path / "both", both(), csv=True).run()
    assert "eval loss" in (said := capsys.readouterr().out) and "code/loss" in said
    found = losses(tmp_path / "both")
    for number, data in enumerate((RaggedData(EVALUATED), Later(EVALUATED))):
        evaluating(tmp_path / str(number), data).run()
        assert [record["eval/loss"] for record in evaluations(tmp_path / str(number))] == [two[number] for two in found]
    assert len(found) == STEPS
    assert "eval/code/loss" in (tmp_path / "both" / "metrics.csv").read_text().splitlines()[0]
    assert report([str(tmp_path / "both"), *words(output=tmp_path / "page.html")]) == 0
    assert "Loss on code" in (tmp_path / "page.html").read_text()
    evaluating(tmp_path / "again", both(), load=str(tmp_path / "both"), skip_train=True, train_iters=1).run()
    assert losses(tmp_path / "again") == found[-1:]
    assert evaluations(tmp_path / "again")[0]["step"] == STEPS
    assert not list((tmp_path / "again").glob("step_*"))


# ---- layouts

PLACES: dict[str, list[tuple[Layout, Changes]]] = {
    "gpt2": [((2, 2, 1), {"sequence_parallel": True}), ((2, 1, 1), {"cp": 2})],
    "softmax": [((2, 1, 2), {"ep": 2, "zero_stage": 3})],
    "bert": [((2, 2, 1), {"sequence_parallel": True})],
}


def evaluated(rank: int, world_size: int, directory: str) -> list[dict[str, float]]:
    """What an evaluation of two sets reports before the first step, on one process or on each layout of four."""
    for number, (name, layout, changes) in enumerate((n, *place) for n, places in PLACES.items() for place in places):
        options = PROGRAMS[name] | {"num_layers": 2, "eval_iters": 2} | (changes if world_size > 1 else {})
        place = f"{directory}/{number}"
        if name == "bert":
            bert = make_bert_config(layout if world_size > 1 else (1, 1, 1), place, **options)
            trainer = make_bert_trainer(bert, build_mesh(bert.parallel))
        else:
            config = make_config(layout if world_size > 1 else (1, 1, 1), place, **options)
            mesh = build_mesh(config.parallel)
            trainer = Trainer(config, mesh, GPTTask(config, mesh), RaggedData(64), both())
        trainer.evaluate()
    return [
        {name: value for name, value in record.items() if name.startswith("eval/")}
        for number in range(sum(map(len, PLACES.values())) if rank == 0 else 0)
        for record in evaluations(Path(directory) / str(number))
    ]


def test_an_evaluation_is_the_same_on_every_layout(tmp_path: Path) -> None:
    expected, found = (run_distributed(evaluated, n, str(tmp_path / str(n)), stay=True)[0] for n in (1, 4))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    bert = expected[-1]
    assert bert["eval/loss"] == pytest.approx(bert["eval/mlm_loss"] + bert["eval/sentence_loss"], rel=1e-12)
    assert 0 <= bert["eval/mlm_accuracy"] < 0.1 < bert["eval/sentence_accuracy"] < 0.9


class WithoutMasks(RaggedPairs):
    """Samples of which no token is predicted, and of which some are pairs, or none is."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])}


@pytest.mark.parametrize("pairs", [True, False])
def test_what_nothing_was_predicted_of_has_no_figure(
    pairs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"train_iters": 2, "log_interval": 1, "eval_interval": 2, "eval_iters": 1}
    config = make_bert_config((1, 1, 1), tmp_path, sentence_task="nsp", **changes)
    trainer = make_bert_trainer(config, Mesh(device=torch.device("cpu")), WithoutMasks(16, packed=False, pairs=pairs))
    trainer.run()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for kind, record in (("train", records[1]), ("eval", records[2])):
        assert record[f"{kind}/mlm_loss"] is None
        assert record.get(f"{kind}/mlm_accuracy") is None
        assert (record[f"{kind}/sentence_loss"] is not None) == pairs
        assert record[f"{kind}/loss"] == record[f"{kind}/sentence_loss"]
    lines = capsys.readouterr().out.splitlines()
    assert sum("mlm loss none" in line for line in lines) == 3
    assert any("eval loss none" in line and "mlm accuracy none" in line for line in lines) != pairs
    warnings = [line for line in lines if "no token that counts for the loss" in line]
    expected = ["warning: step 1 has no token", "warning: 2 of 2 logged steps had no token"]
    assert len(warnings) == (0 if pairs else 2)
    assert all(line.startswith(start) for line, start in zip(warnings, expected, strict=False))


# ---- what a run announces --------------------------------------------------------------------------------------------


def test_the_summary_comes_before_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any) -> None:
        raise AssertionError("built")

    monkeypatch.setattr(step, "parallelize", build)
    config = make_config((1, 1, 1), tmp_path, peak_tflops=2.0)
    with pytest.raises(AssertionError, match="built"):
        make_trainer(config, build_mesh(config.parallel))
    said = capsys.readouterr().out
    assert "topology  pp 1 x dp 1 x tp 1 = 1 rank" in said
    assert "MFU is a share of 2 TFLOP/s (cpu, fp32)" in said
    assert "MiB of state on the fullest rank, by formula" in said


def test_what_does_not_fit_is_refused_before_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "host_memory", lambda: AvailableMemory(float(2**16), "a small machine"))
    monkeypatch.setattr(step, "parallelize", lambda *_: pytest.fail("built"))
    config = make_config((1, 1, 1), tmp_path)
    with pytest.raises(
        ConfigError, match=r"needs at least [\d.]+ MiB .* but 64\.0 KiB are available \(a small machine\)"
    ):
        make_trainer(config, build_mesh(config.parallel))


def test_the_engine_counts_the_state_of_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of 2^28 numbers, 16 bytes each with AdamW."""
    monkeypatch.setattr(fit, "host_memory", lambda: AvailableMemory(3.9 * GIB, "a small machine"))
    layers = [Layer("wide", nn.Linear, 1 << 14, 1 << 14, bias=False)]
    with pytest.raises(ConfigError, match=r"state        4\.0 GiB.*\nmemory_check=False"):
        PipelineEngine(layers, loss=nn.functional.mse_loss, train_iters=1, optimizer=OptimizerConfig())


# ---- scoring ---------------------------------------------------------------------------------------------------------

ENDS = {"bos": "<begin>", "eos": "<end>"}
TOKENIZER = tokenizer(ENDS)
BEGIN = TOKENIZER.encode(ENDS["bos"])[0]
LENGTHS = (28 + 3 * 6, 20, 2)  # tokens of the documents


@pytest.fixture(scope="module", params=["gpt2", "llama3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A model of transformers in fp64, and its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param)
    directory = save_model(model, folder / "hf")
    TOKENIZER.save(directory)
    to_megacore(directory, folder / "megacore")
    return model.double().eval(), folder / "megacore"


def texts() -> list[str]:
    random = np.random.default_rng(3)
    return [" ".join(f"w{n}" for n in random.integers(0, 30, length)) for length in LENGTHS]


def log_likelihood(model: nn.Module, tokens: list[int], predicted: int) -> float:
    """log P of the last tokens, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    return float(-F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")[-predicted:].sum())


def strided(model: nn.Module, tokens: list[int], length: int, stride: int) -> tuple[float, int]:
    """Nats and tokens as the documentation of transformers computes them: windows of `length` tokens, of which those
    that an earlier one has are context."""
    nats, count, last = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + length, len(tokens))
        predicted = min(end - last, end - begin - 1)
        nats -= log_likelihood(model, tokens[begin:end], predicted)
        count, last = count + predicted, end
        if end == len(tokens):
            break
    return nats, count


def measured(capsys: pytest.CaptureFixture[str], checkpoint: Path, **flags: Any) -> dict[str, Any]:
    capsys.readouterr()
    given = [*words(checkpoint=checkpoint, device="cpu", **flags), "--json"]
    assert perplexity(given) == 0, capsys.readouterr().err
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


def test_perplexity_is_that_of_transformers(
    pair: tuple[nn.Module, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, checkpoint = pair
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    flags = {"input": tmp_path / "t.jsonl", "prefix": "none", "context": 27, "stride": 6, "batch_size": 2}
    found = measured(capsys, checkpoint, **flags, per_document=tmp_path / "each.jsonl")
    expected = [strided(model, TOKENIZER.encode(text), 28, 6) for text in texts()]
    nats, count = (sum(column) for column in zip(*expected, strict=True))
    size = sum(len(text) for text in texts())
    assert (found["tokens"], found["bytes"], found["documents"]) == (count, size, 3)
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    records = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text().splitlines()]
    assert [record["nats"] for record in records] == pytest.approx([one for one, _ in expected], rel=1e-5)
    begun = measured(capsys, checkpoint, input=tmp_path / "t.jsonl")  # auto: <begin>, and the model's positions
    assert (begun["tokens"], begun["context"], begun["stride"]) == (count + 3, POSITIONS, POSITIONS // 2)
    (tmp_path / "t.txt").write_text(texts()[1])
    assert TOKENIZER.bos == BEGIN
    begun = measured(capsys, checkpoint, input=tmp_path / "t.txt")
    tokens = [BEGIN, *TOKENIZER.encode(texts()[1])]
    assert begun["nats"] == pytest.approx(-log_likelihood(model, tokens, len(tokens) - 1), rel=1e-5)


def test_windows_predict_every_token_once() -> None:
    for count, first, length, stride in ((50, 1, 10, 3), (50, 20, 10, 10), (5, 1, 10, 5), (12, 4, 10, 1), (1, 1, 4, 2)):
        made = list(windows(range(count), first, length=length, stride=stride))
        predicted = [token for window in made for token in window.tokens[-window.predicted :]]
        assert predicted == list(range(first, count))
        assert all(window.predicted < len(window.tokens) <= length + 1 for window in made)
        assert all(len(window.tokens) - window.predicted > length - stride for window in made[1:])


def scorer_of(checkpoint: Path, **changes: Any) -> TextScorer:
    return TextScorer.of_checkpoint(checkpoint, device="cpu", **changes)


def test_continuations_are_as_likely_as_in_transformers(pair: tuple[nn.Module, Path]) -> None:
    model, checkpoint = pair
    scorer = scorer_of(checkpoint, batch_size=3)
    pairs = [("w1 w2", " w3 w4"), ("w1 w2 ", "w3"), ("", "w5 w6"), (texts()[0], " w7 w8"), ("w9", " " + texts()[1])]
    for (context, continuation), (found, greedy) in zip(pairs, scorer.log_likelihoods(pairs), strict=True):
        before = TOKENIZER.encode(context) or [BEGIN]
        after = TOKENIZER.encode(continuation)
        tokens = [*before, *after][-POSITIONS - 1 :]
        assert found == pytest.approx(log_likelihood(model, tokens, len(after)), rel=1e-5)
        with torch.no_grad():
            likeliest = model(torch.tensor([tokens[:-1]])).logits[0, -len(after) :].argmax(-1).tolist()
        assert greedy == (likeliest == after)
    (rolling,) = scorer.rolling([texts()[0]])
    tokens = [BEGIN, *TOKENIZER.encode(texts()[0])]  # 46 of them are predicted, 40 at first
    rest = log_likelihood(model, tokens[-POSITIONS - 1 :], len(tokens) - 1 - POSITIONS)
    assert rolling == pytest.approx(log_likelihood(model, tokens[: POSITIONS + 1], POSITIONS) + rest, rel=1e-5)


@pytest.mark.parametrize("penalty", [1.0, 1.7, 0.6])
def test_generation_is_that_of_transformers_and_stops(pair: tuple[nn.Module, Path], penalty: float) -> None:
    model, checkpoint = pair
    scorer = scorer_of(checkpoint)
    prompt = TOKENIZER.encode("w1 w2 w3")
    with torch.no_grad():
        out = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, repetition_penalty=penalty
        )[0].tolist()
    expected = TOKENIZER.decode(out)[len("w1 w2 w3") :].partition(ENDS["eos"])[0]
    greedy = Sampling(temperature=0.0, repetition_penalty=penalty)
    assert scorer.continuation("w1 w2 w3", until=[], most=6, sampling=greedy) == expected
    if words_of := expected.split():
        ended = scorer.continuation("w1 w2 w3", until=[words_of[-1]], most=6, sampling=greedy)
        assert ended == expected[: expected.index(words_of[-1])]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"context": 41}, "a context of 41 tokens is more than the model's 40 positions: use 40 or less"),
        ({"context": 10, "stride": 11}, "--stride 11 is more than the context of 10 tokens: use 10 or less"),
        ({"data_path": "nowhere"}, "give texts with --input FILE..., or a dataset with --data-path PREFIX"),
        ({"input": "nowhere.txt"}, "--input nowhere.txt cannot be read"),
        ({"per_document": "nowhere/each"}, "--per-document nowhere/each cannot be written: name a file in a directory"),
    ],
    ids=str,
)
def test_refusals(
    pair: tuple[nn.Module, Path], flags: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("w1 w2")
    assert perplexity(words(**{"checkpoint": pair[1], "input": tmp_path / "t.txt", **flags})) == 2
    assert said in capsys.readouterr().err


def test_results_replace_no_input_and_are_whole_or_absent(
    pair: tuple[nn.Module, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, each = tmp_path / "t.txt", tmp_path / "each.jsonl"
    text.write_text("w1 w2")
    assert perplexity(words(checkpoint=pair[1], input=text, per_document=text)) == 2
    assert "would overwrite one of the inputs" in capsys.readouterr().err
    assert text.read_text() == "w1 w2"
    (tmp_path / "bad.jsonl").write_text('{"text": "w1 w2"}\n{"text": 5}\n')
    assert perplexity(words(checkpoint=pair[1], input=tmp_path / "bad.jsonl", per_document=each)) == 2
    assert not each.exists()


# ---- averaged weights


UPDATES, DECAY = 4, 0.7
LAYOUTS: dict[str, tuple[Layout, Changes]] = {
    "tp2": ((2, 1, 1), {"optimizer": "muon"}),
    "pp2": ((1, 2, 1), {}),
    "z0": ((1, 1, 2), {"optimizer": "lamb"}),
    "z1": ((1, 1, 2), {"zero_stage": 1, "precision": "bf16"}),
    "z2": ((1, 1, 2), {"zero_stage": 2, "optimizer": "muon"}),
    "z3": ((1, 1, 2), {"zero_stage": 3}),
    "offload": ((1, 1, 2), {"zero_stage": 1, "offload_optimizer": True}),
    "ep2": ((1, 1, 2), {"ep": 2, "zero_stage": 1, "num_experts": 4, "moe_ffn_hidden_size": 16}),
}


def averaging(layout: Layout, directory: Path | str, **changes: Any) -> Trainer:
    fixed = {"num_layers": 2, "train_iters": UPDATES, "micro_batch_size": 1, "lr_warmup_iters": 1, "ema_decay": DECAY}
    return runs.trainer_of(layout, directory, **{**fixed, **changes})


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return gather(trainer, trainer.mesh, lambda owned: owned.master, everywhere=True)


def average(trainer: Trainer) -> dict[str, Tensor]:
    optimizer = trainer.update.optimizer
    return gather(trainer, trainer.mesh, lambda owned: owned.state(optimizer, "ema"), everywhere=True)


def require_average(trainer: Trainer) -> None:
    """Train, and compare the average with that of torch over the weights of all steps."""
    expected = weights(trainer)
    apply = get_ema_multi_avg_fn(DECAY)
    for number in range(UPDATES):
        trainer.train_step(next(trainer.batches))
        apply(list(expected.values()), list(weights(trainer).values()), number)
    for name, value in average(trainer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-8)
        assert not torch.equal(value, weights(trainer)[name])


def averages(rank: int, ranks: int, directory: str, names: list[str]) -> None:
    for name in names:
        layout, changes = LAYOUTS[name]
        require_average(averaging(layout, directory, **changes))


def test_the_average_is_that_of_torch(tmp_path: Path) -> None:
    require_average(averaging((1, 1, 1), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("names", [["tp2", "z1"], ["pp2", "z0"], ["z2", "z3"], ["offload", "ep2"]], ids=str)
def test_the_average_is_that_of_torch_on_every_layout(names: list[str], tmp_path: Path) -> None:
    run_distributed(averages, 2, str(tmp_path), names, timeout=120)


def test_it_begins_with_the_weights_of_a_checkpoint_that_has_none(tmp_path: Path) -> None:
    before = averaging((1, 1, 1), tmp_path, ema_decay=None)
    before.train_step(next(before.batches))
    before.save()
    trainer = averaging((1, 1, 1), tmp_path, load=str(tmp_path))
    first = weights(trainer)
    trainer.train_step(next(trainer.batches))
    for name, value in average(trainer).items():
        torch.testing.assert_close(value, DECAY * first[name] + (1 - DECAY) * weights(trainer)[name])


def loss_of(trainer: Trainer) -> float:
    loss = trainer.evaluate()
    assert loss is not None
    return loss


def evaluate_and_train_on(rank: int, ranks: int, directory: str, changes: Changes) -> None:
    changes = {"eval_iters": 2, "train_iters": UPDATES + 1, **changes}
    averaged, plain = (averaging((1, 1, ranks), directory, eval_ema=eval_ema, **changes) for eval_ema in (True, False))
    for trainer in (averaged, plain):
        for _ in range(UPDATES):
            trainer.train_step(next(trainer.batches))
    before, other = weights(averaged), average(averaged)
    assert loss_of(averaged) != loss_of(plain)
    assert all(torch.equal(weights(averaged)[name], value) for name, value in before.items())
    assert all(torch.equal(average(averaged)[name], value) for name, value in other.items())
    assert averaged.train_step(next(averaged.batches)).loss == plain.train_step(next(plain.batches)).loss
    for local, same in zip(averaged.model.data_parallel.segments, plain.model.data_parallel.segments, strict=True):
        kept = local.state(averaged.update.optimizer, "ema")
        assert kept is not None
        same.master.copy_(kept)
    plain.model.data_parallel.publish()
    assert loss_of(averaged) == loss_of(plain)


@pytest.mark.parametrize(("ranks", "changes"), [(1, {}), (2, {"zero_stage": 1, "precision": "bf16"})], ids=str)
def test_an_evaluation_computes_with_the_average_and_leaves_the_weights(
    ranks: int, changes: Changes, tmp_path: Path
) -> None:
    run_distributed(evaluate_and_train_on, ranks, str(tmp_path), changes)


def test_the_converter_exports_the_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = averaging((1, 1, 1), tmp_path / "run")
    for _ in range(2):
        trainer.train_step(next(trainer.batches))
    trainer.save()
    flags = [*words(input=tmp_path / "run", output=tmp_path / "hf"), "--from", "megacore", "--to", "hf"]
    assert convert([*flags, "--ema"]) == 0, capsys.readouterr().err
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    (embedding,) = (value for name, value in exported.items() if name.endswith("wte.weight"))
    assert torch.equal(embedding, average(trainer)["embedding.tokens.weight"])
    without = averaging((1, 1, 1), tmp_path / "without", ema_decay=None)
    without.save()
    flags = [*words(input=tmp_path / "without", output=tmp_path / "none"), "--from", "megacore", "--to", "hf", "--ema"]
    assert convert(flags) == 2
    assert "has no average of the weights" in capsys.readouterr().err
