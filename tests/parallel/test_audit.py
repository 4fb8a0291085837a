"""A run's ledger: the same lines on every layout, whatever tampers with it or with a checkpoint is found, and a step
can be computed again elsewhere. tests/matrix compares the hashes of many more layouts."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacore.audit.command import main
from megacore.audit.commits import first_change
from megacore.audit.ledger import FILE, lines_of, sealed
from megacore.audit.narrow import trainer_of
from megacore.audit.state_hash import Part, part_hash
from megacore.checkpoint.files import describe
from megacore.checkpoint.manifest import Manifest, marked_in_doubt, read_manifest
from megacore.errors import UserError
from megacore.parallel.mesh import build_mesh, compute_reproducibly
from megacore.train.step import TrainStep
from tests.accelerator.device import needs_pretend
from tests.distributed import run_distributed
from tests.parity.bert_runs import make_bert_config
from tests.parity.runs import Layout, make_config

RUN: dict[str, Any] = {
    "num_layers": 2, "train_iters": 6, "lr_warmup_iters": 1, "save_interval": 2, "micro_batch_size": 1,
    "global_batch_size": 4, "reproducible": True, "ledger": True, "ledger_interval": 1,
}  # fmt: skip
SAVED = "step_00000004"


def train(rank: int, ranks: int, directory: str, starts: list[tuple[Layout, dict[str, Any]]]) -> None:
    """Train in one directory, from each start to the end."""
    for layout, changes in starts:
        config = (make_bert_config if "bert_style" in changes else make_config)(layout, directory, **RUN | changes)
        if config.training.reproducible:
            compute_reproducibly()
        trainer_of(config, build_mesh(config.parallel)).run()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on tp 2, which dp 2 has continued from step 2."""
    directory = tmp_path_factory.mktemp("run")
    again = {"load": str(directory / "step_00000002"), "zero_stage": 2}
    run_distributed(train, 2, str(directory), [((2, 1, 1), {}), ((1, 1, 2), again)], timeout=120)
    return directory


def audited(rank: int, ranks: int, words: list[str], broken: str | None = None) -> tuple[int, str]:
    """The exit status of the tool on this rank, where a function of megacore may be another one, and what it prints."""
    output, place = io.StringIO(), contextlib.nullcontext() if broken is None else mock.patch(broken, BROKEN[broken])
    with contextlib.redirect_stdout(output), place:
        status = main(words)
    return status, output.getvalue()


def test_a_start_on_another_layout_takes_the_same_steps_again(run: Path) -> None:
    marked = run / "step_00000006" / "manifest.json"
    marked.write_text(marked_in_doubt(marked.parent))  # as a run does that diverges
    status, said = audited(0, 1, [str(run)])
    assert status == 0, said
    assert "2 starts; every seal holds\n  steps 1 to 6; of 6 steps the state: exp_avg, exp_avg_sq, model\n" in said
    assert re.search(r"line \d+ goes back behind steps 3 to 6", said), said
    assert f"  {SAVED}: every tensor is what the ledger says\n" in said
    kept = [{**line.record, "previous": ""} for line in lines_of(run / FILE) if line.kind == "step" and line.step > 2]
    assert len(kept) == 8 and kept[:4] == kept[4:]


STATES: list[tuple[Layout, dict[str, Any]]] = [
    ((1, 1, 2), {"optimizer": "muon", "zero_stage": 1}),
    ((1, 2, 1), {"optimizer": "adafactor"}),
    ((1, 2, 1), {"ema_decay": 0.9, "moments_dtype": "int8"}),
    ((1, 1, 2), {"moments_dtype": "bf16", "precision": "bf16", "zero_stage": 3, "grad_reduce_compression": "int8"}),
    ((1, 1, 2), {"num_experts": 4, "disable_bias_linear": True, "moe_router_enable_expert_bias": True, "ep": 2}),
    ((1, 1, 2), {"offload_optimizer": True, "optimizer": "lion"}),
]


def train_each(rank: int, ranks: int, directory: str) -> None:
    for number, (layout, changes) in enumerate(STATES):
        train(rank, ranks, f"{directory}/{number}", [(layout, {"reproducible": False, "train_iters": 2, **changes})])


def test_every_state_is_in_the_ledger_as_checkpoints_have_it(tmp_path: Path) -> None:
    run_distributed(train_each, 2, str(tmp_path), timeout=120)
    for number, (_, changes) in enumerate(STATES):
        status, said = audited(0, 1, [str(tmp_path / str(number))])
        assert status == 0 and "step_00000002: every tensor is what the ledger says" in said, (changes, said)
        assert ("not covered: gradient_" in said) == ("grad_reduce_compression" in changes), said
    for number, flags in ((3, "--zero-stage 3"), (4, "--ep 2")):
        words = [str(tmp_path / str(number)), "--bisect", "--device", "cpu", *flags.split()]
        (status, said), _ = run_distributed(audited, 2, words, init=False)
        assert status == 0 and "  not compared with one process: " in said, said


@needs_pretend
def test_on_an_accelerator_samples_stay_until_they_are_hashed_and_no_line_is_lost(tmp_path: Path) -> None:
    starts = [((1, 1, 2), {"device": "pretend", "precision": "bf16", "zero_stage": 1, "reproducible": False})]
    run_distributed(train, 2, str(tmp_path), starts, backend="pretend")
    status, said = audited(0, 1, [str(tmp_path)])
    assert status == 0 and "steps 1 to 6; of 6 steps the state" in said, said


# ---- tampering


def flipped(kind: str) -> Callable[[Path], None]:
    """Change a bit of a tensor of a checkpoint."""

    def tamper(run: Path) -> None:
        file = next((run / SAVED).glob(f"{kind}-*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-3] ^= 4
        file.write_bytes(content)

    return tamper


def resealed(run: Path, **changes: Any) -> None:
    """Change a checkpoint's manifest, and seal it anew."""
    manifest: Manifest = read_manifest(run / SAVED)
    files = {name: describe(run / SAVED / name) for name in manifest.files}
    text = dataclasses.replace(manifest, files=files, **changes).to_json()
    (run / SAVED / "manifest.json").write_text(text)


def rewritten(*, at: int | None = None, seals: str = "none", **changes: Any) -> Callable[[Path], None]:
    """Change a line, by default of step 4: its text alone, with a seal of its own, or all lines with new seals."""

    def tamper(run: Path) -> None:
        lines, text, previous = list(lines_of(run / FILE)), b"", "0" * 64
        number = at or max(line.number for line in lines if line.kind == "step" and line.step == 4)
        for line in lines:
            record = dict(line.record)
            linked = record.pop("previous") if seals != "all" else previous
            record.pop("sha256", None)
            new, previous = sealed(record | (changes if line.number == number else {}), linked)
            text += new if seals != "none" or line.number != number else new.replace(new[12:76], line.sha256.encode())
        (run / FILE).write_bytes(text)

    return tamper


def reordered(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        (run / FILE).write_bytes(b"".join(change((run / FILE).read_bytes().splitlines(keepends=True))))

    return tamper


def forged(run: Path) -> None:
    flipped("model")(run)
    resealed(run)


NOT_SAVED = f"wrong: {SAVED}: no line has its manifest.json: it was changed, or saved while no ledger was written"
TAMPERINGS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of a weight": (flipped("model"), rf"^wrong: {SAVED}: model-\S+ is not what its manifest says\nwrong:"),
    "a bit of a moment": (flipped("exp_avg"), rf"^wrong: {SAVED}: exp_avg of \S+ is not what line \d+ says$"),
    "a bit, and new checksums": (forged, rf"^{NOT_SAVED}\nwrong: {SAVED}: model of \S+ is not what"),
    "the position": (lambda run: resealed(run, consumed_samples=20), rf"{NOT_SAVED}\nwrong: {SAVED}: cons"),
    "the samples": (rewritten(samples=[8, 12]), r"^wrong: line \d+ of \S+ was changed"),
    "the loss, sealed": (rewritten(loss="0x1p+2", seals="one"), r"^wrong: line \d+ of \S+ does not follow line"),
    "the samples, all sealed": (rewritten(samples=[8, 12], seals="all"), r"^wrong: line \d+ of \S+ has step 4 from"),
    "the state, all sealed": (rewritten(state={"model": "0" * 16}, seals="all"), r"has other model after step 4"),
    "the loss, all sealed": (rewritten(loss="0x1p+2", seals="all"), r"^wrong: \S+ has no line with the seal"),
    "a line less": (reordered(lambda lines: lines[:3] + lines[4:]), r"^wrong: line 4 of \S+ does not follow line 3"),
    "no last line": (reordered(lambda lines: lines[:-1]), r"^wrong: \S+ has no line with the seal"),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERINGS)
def test_tampering_is_found_by_name(what: str, run: Path, tmp_path: Path) -> None:
    tamper, expected = TAMPERINGS[what]
    shutil.copytree(run, tmp_path / "run")
    *_, last = lines_of(run / FILE)
    tamper(tmp_path / "run")
    status, said = audited(0, 1, [str(tmp_path / "run"), "--seal", last.sha256])
    assert status == 1 and re.search(expected, said, re.MULTILINE), said


# ---- computing again


FIRST, CLIP = "megacore.train.gpt_task.GPTTask.first_input", "megacore.optim.update.clip_factor"
TIED, ON_CPU = "megacore.optim.update.all_reduce_tied_", "megacore.audit.replay.computes_on_cpu"
BROKEN: dict[str, Any] = {
    CLIP: lambda norm, limit: torch.ones_like(norm),
    TIED: lambda gradient, holders: gradient + [0, torch.nan][torch.distributed.get_rank()],
    ON_CPU: lambda device: False,
    FIRST: lambda task, microbatch: microbatch.tokens.roll(torch.distributed.get_rank(), 1),
}
ALONE = r"^wrong:   on this layout gradient embedding.tokens.weight of step 5 is the first .* on ranks 0, 1$"
OF_SAMPLE = r"^wrong:   on this layout output embedding, microbatch (\d+) of step 5 .* on rank 1, of samples \1$"
AGREES = r"ledger.jsonl: steps up to 6, computed again, agree bit for bit"
AGAIN: dict[str, tuple[int, str, str | None, str]] = {
    "one process": (1, "", None, AGREES),
    "pp": (2, "--pp 2", None, AGREES),
    "tp": (2, "--tp 2 --sequence-parallel", None, AGREES),
    "zero": (2, "--zero-stage 3", None, AGREES),
    "from the initial weights": (1, "--replay 1-6", None, AGREES),
    "another rate": (1, "--lr 0.002", None, r"^wrong: step 5 .*: lr 9\.5.* and 0\.00019"),
    "other samples": (1, "--seed 5", None, r"^wrong: step 5 \(line \d+\): data .*: the samples with these numbers"),
    "another line of code": (1, "", CLIP, r"^wrong: step 5 .*: state .*; first .*, \d+ of"),
    "a lost all-reduce": (2, "--pp 2", TIED, r"^wrong: step 5 .*: norm .*: the backward"),
    "a lost all-reduce, and where": (2, "--pp 2 --bisect", TIED, ALONE),
    "other tokens, and where": (2, "--dp 2 --bisect", FIRST, OF_SAMPLE),
}  # fmt: skip


@pytest.mark.parametrize("what", AGAIN)
def test_steps_computed_again_agree_on_any_layout_unless_something_else_is_computed(what: str, run: Path) -> None:
    ranks, flags, broken, expected = AGAIN[what]
    words = [str(run), *([] if "--replay" in flags else ["--replay", "6"]), "--device", "cpu", *flags.split()]
    (status, said), *_ = run_distributed(audited, ranks, words, broken, init=False)
    assert status == (expected != AGREES) and re.search(expected, said, re.MULTILINE), said


def test_one_process_draws_the_dropout_masks_of_the_layout(run: Path, tmp_path: Path) -> None:
    base, context = str(run / SAVED), {"hidden_dropout": 0.1, "cp": 2, "cp_comm": "ring"}
    adapters = {"lora_rank": 4, "lora_dropout": 0.5, "sequence_parallel": True, "pretrained_checkpoint": base}
    bert = {"bert_style": "classic", "hidden_dropout": 0.1, "attention_dropout": 0.1}
    for tp, changes in (2, adapters), (2, bert), (1, context):
        shutil.rmtree(tmp_path)
        run_distributed(train, 2, str(tmp_path), [((tp, 1, 1), changes | {"reproducible": False, "train_iters": 2})])
        words = [str(tmp_path), "--replay", "1-2", "--device", "cpu"]
        status, said = audited(0, 1, words)
        assert status == 0 and "agree to rounding" in said, said
    ring, alone = "--cp 2 --cp-comm ring --bisect", "one process: it draws the dropout masks only with --device cpu"
    for flags, broken, expected, why in ("--dp 2", None, 2, ""), (ring, None, 0, ""), (ring, ON_CPU, 0, alone):
        (status, said), *_ = run_distributed(audited, 2, [*words, *flags.split()], broken, init=False)
        assert status == expected and why in said, said


def test_a_run_that_goes_on_with_other_settings_is_computed_again_in_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(tp: int, **changes: Any) -> None:
        changes |= {"on_spike": "rollback", "spike_window": 4}
        run_distributed(train, tp, str(tmp_path), [((tp, 1, 1), changes)])

    begin(1, train_iters=4, lr_decay_iters=6, spike_threshold=0.001, spike_skip_batches=3)
    first, *_ = lines_of(tmp_path / FILE)
    earlier = {k.replace("on-spike window", "spike-window"): text for k, text in first.record["facts"].items()}
    rewritten(at=1, seals="all", facts=earlier)(tmp_path)
    reordered(lambda lines: lines[:-1])(tmp_path)
    begin(2, load=str(tmp_path), global_batch_size=2, spike_threshold=1e3, spike_skip_batches=3)
    changes = "(--global-batch-size: 4 and 2; --train-iters: 4 and 6; --on-spike threshold: 0.001 and 1000.0)"
    cut = f"  steps up to 4 agree; from step 5 on with other settings {changes}\n"
    for steps, ranks, flags in (("6", 1, ""), ("3-6", 1, ""), ("1-6", 2, "--bisect --pp 2")):
        words = [str(tmp_path), "--replay", steps, "--device", "cpu", *flags.split()]
        (status, said), *_ = run_distributed(audited, ranks, words, init=False)
        assert status == 0 and re.search(AGREES, said) and (cut in said or steps == "6"), said
    assert "steps up to 2 agree; from step 3 on with other samples\n" in said
    shutil.rmtree(tmp_path / SAVED)
    shutil.rmtree(tmp_path / "step_00000002")
    assert "not there: checkpoints of step 2, which" in audited(0, 1, [str(tmp_path)])[1]  # another of step 2 is
    assert audited(0, 1, [str(tmp_path), "--replay", "3-6", "--device", "cpu"]) == (2, "")
    assert "give a checkpoint of step 4 with --checkpoint, or use --replay 3-4" in capsys.readouterr().err
    rewritten(at=1, seals="all", facts=earlier | {"--lr": "f()"})(tmp_path)
    assert audited(0, 1, [str(tmp_path), "--replay", "3-4", "--device", "cpu"]) == (2, "")
    assert f"--lr of line 1 of {tmp_path / FILE} is no value: 'f()'" in capsys.readouterr().err


def test_the_first_step_that_differs_from_another_run_is_found(run: Path, tmp_path: Path) -> None:
    run_distributed(train, 1, str(tmp_path), [((1, 1, 1), {"weight_decay": 0.2})])
    status, said = audited(0, 1, [str(run), "--bisect", str(tmp_path)])
    assert status == 1 and re.search(r"^wrong: step 1 \(lines 2 and 2\)\S*: state ", said, re.MULTILINE), said
    assert "\nwrong:   --weight-decay: 0.1 and 0.2\n" in said
    with mock.patch.dict("os.environ", RANK="1"):  # torchrun ends the others with a rank that fails
        assert audited(0, 1, [str(run), "--seal", "x"]) == (0, "")
    with (
        mock.patch("megacore.audit.replay._otherwise", return_value=["other weights"]),
        mock.patch("megacore.audit.command.first_change", lambda _, words: [" ".join(words)]),
    ):
        _, said = audited(0, 1, [str(run), "--bisect", "--against", "HEAD", "--device", "cpu"])
        assert "--replay 1 --device cpu\n" in said, said
        assert audited(0, 1, [str(run), "--bisect", "--against", "x", "--device", "cpu"]) == (2, "")


def flipped_step(steps: TrainStep, *, votes: Any, take: Any = TrainStep.update_weights) -> Any:
    """A bit of a moment changes on one rank in step 3."""
    result = take(steps, votes=votes)
    if result.step == 3 and torch.distributed.get_rank() == 1:
        moment = steps.update.optimizer.values(steps.model.data_parallel.segments[-1], "exp_avg")
        assert moment is not None
        moment.view(torch.int32)[2] ^= 1 << 29
    return result


def train_flipped(rank: int, ranks: int, directory: str) -> None:
    with mock.patch.object(TrainStep, "update_weights", flipped_step):
        train(rank, ranks, directory, [((1, 1, 2), {"zero_stage": 1})])


def test_the_element_that_a_computer_changed_is_found(tmp_path: Path) -> None:
    run_distributed(train_flipped, 2, str(tmp_path))
    words = [str(tmp_path), "--bisect", "--device", "cpu", "--zero-stage", "1"]
    (status, said), *_ = run_distributed(audited, 2, words, init=False)
    element = r"^wrong:   exp_avg of \S+\[\d+(, \d+)?\] was \S+ and is \S+, on rank 1; no other element of exp"
    assert status == 1 and re.search(r"^wrong: step 3 ", said, re.MULTILINE), said
    assert re.search(element, said, re.MULTILINE) and "this layout and one process agree now" in said, said


def git(tree: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tree, check=True)


def test_the_commit_that_changed_a_step_is_found(tmp_path: Path) -> None:
    program = tmp_path / "tools" / "audit.py"
    program.parent.mkdir()
    git(tmp_path, "init", "-q")
    for number, status in enumerate([0, 0, 2, 0, 1, 1, 1]):
        program.write_text(f"import sys\nprint('wrong: {number}')\nsys.exit({status})\n")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", f"Change {number}")
    for end in ("HEAD~6", "HEAD~5"):
        _, *commits = first_change(end, [], tmp_path)
        assert [commit.split(": ")[1] for commit in commits] == ["Change 4"]
    program.write_text("")
    uncommitted = "of HEAD~1 and of HEAD, without what is not committed: "
    for end, why in ("HEAD~1", uncommitted), ("x", "--against x is no commit"), ("HEAD~4", "not compute"):
        with pytest.raises(UserError, match=why):
            list(first_change(end, [], tmp_path))


# ---- the hash


def test_the_hash_of_slices_and_of_shards_with_padding_is_that_of_the_whole() -> None:
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(7, 3, 5, generator=draw)

    def of(values: torch.Tensor, slices: Any, start: int, stop: int) -> int:
        padded = torch.full([size + 2 for size in values.shape], torch.nan)
        padded[tuple(map(slice, values.shape))] = values
        flat = padded.flatten()[start:stop]
        return int(part_hash(Part(flat, start, padded.shape, slices)))

    everything, end = of(whole, ((0, 7), (0, 3), (0, 5)), 0, 10**6), 10**6
    parts = [of(whole[:4], ((0, 4), (0, 3), (0, 5)), *cut) for cut in ((0, 1), (1, 50), (50, 51), (51, end))]
    parts += [of(whole[4:, :, a:b], ((4, 7), (0, 3), (a, b)), 0, end) for a, b in ((0, 2), (2, 5))]
    assert (sum(parts) - everything) % 2**64 == 0
    for place in range(whole.numel()):
        changed = whole.clone()
        changed.view(-1).view(torch.int32)[place] ^= 1 << (place % 31)
        assert of(changed, ((0, 7), (0, 3), (0, 5)), 0, end) != everything
