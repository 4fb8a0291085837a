"""The command line as a user meets it: what is taken, and what each refusal says, on which rank, and once."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacore.config import SECTIONS, Config, ResolvedConfig, cli
from megacore.config.cli import flag_names, leave_for_launcher, save_toml
from megacore.config.flags import all_fields
from megacore.config.schema import UNKNOWN_VOCAB_SIZE
from megacore.errors import ConfigError, DataError
from tests.patience import patience
from tests.unit import refusals
from tests.unit.refusals import GOOD, Refuse, parse, problems

ROOT = Path(__file__).parents[2]
alone, refuse = refusals.alone, refusals.refuse  # fixtures


# ---- what is accepted ------------------------------------------------------------------------------------------------


def test_flags_become_fields() -> None:
    config = parse(
        *GOOD, "--num-layers", "3", "--lr", "1e-4", "--data-cache-path", "c", "--untie-embeddings-and-output-weights"
    )
    assert (config.model.num_layers, config.optimizer.lr, config.data.data_cache_path) == (3, 1e-4, "c")
    assert config.model.untie_embeddings_and_output_weights
    assert config.training.train_iters == 10


def test_spellings_of_a_flag_are_equal() -> None:
    spellings = (
        ["--micro-batch-size", "4"],
        ["--micro_batch_size", "4"],
        ["--micro-batch-size=4"],
        ["--micro_batch-size=4"],
        ["--micro-batch-size", "4", "--micro-batch-size=4"],
    )
    assert len({repr(parse(*GOOD, *spelling)) for spelling in spellings}) == 1


# Flags without which a flag is refused.
ROPE = ["--position-embedding-type", "rope"]
YARN = [*ROPE, "--rope-scaling", "yarn", "--rope-original-max-positions", "8"]
LATENT = [*ROPE, "--multi-latent-attention", "--disable-bias-linear"]
NEEDED = {
    "wandb_name": ["--wandb-project", "a"],
    "etp": ["--num-experts", "2", "--disable-bias-linear"],
    "moe_shared_expert_size": ["--num-experts", "2", "--disable-bias-linear"],
    **dict.fromkeys(("rope_beta_fast", "rope_beta_slow", "rope_mscale", "rope_mscale_all_dim"), YARN),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), LATENT),
}


def test_every_alias_equals_its_flag(tmp_path: Path) -> None:
    values = {"norm_epsilon": "1e-3", "tokenizer": str(tmp_path), "output_dir": str(tmp_path)}
    values |= {"qk_rope_head_dim": "8", "rope_beta_fast": "64"}
    aliased = [info for info in all_fields().values() if info.aliases]
    assert len(aliased) >= 6
    for info in aliased:
        value = [] if info.kind is bool else [values.get(info.name, "1")]
        needed = NEEDED.get(info.name, [])
        assert len({repr(parse(*GOOD, *needed, name, *value)) for name in info.flags}) == 1, info.name


RELIED_ON = """
--tensor-model-parallel-size --pipeline-model-parallel-size --tokenizer-model --hidden-size --seq-length --config --load
--global-batch-size --train-iters --lr-warmup-iters --min-lr --clip-grad --weight-decay --adam-beta1 --save --split
--log-interval --eval-interval --eval-iters --num-workers --data-cache-path --lr-decay-style --tp --pp --dp --data-path
--tokenizer --num-layers --num-attention-heads --ffn-hidden-size --micro-batch-size --lr --hidden-dropout --preset
--attention-dropout --seed --output-dir --mock-data
"""


def test_the_names_that_scripts_rely_on_exist() -> None:
    assert set(RELIED_ON.split()) <= {name for main, others in flag_names().items() for name in (main, *others)}


def test_switches_and_none() -> None:
    assert not parse(*GOOD, "--no-eod-mask-loss").data.eod_mask_loss
    assert parse(*GOOD, "--dp", "None").parallel.dp == 1
    assert parse(*GOOD, "--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "2").optimizer.lr_decay_style == "WSD"


@pytest.mark.parametrize("first", [["--data-path", "0.3"], ["--data-path=0.3"]])
def test_a_list_takes_all_values_up_to_the_next_flag(first: list[str], tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    for prefix in (a, b):
        for ending in (".bin", ".idx"):
            Path(prefix + ending).touch()
    config = parse(*first, a, "0.7", b, *GOOD[1:])
    assert config.data.data_path == ("0.3", a, "0.7", b)
    assert config.data.blend() == ((a, b), (0.3, 0.7))


def test_flags_are_stronger_than_the_file_which_is_stronger_than_the_preset(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        "[model]\nnum_layers = 3\nhidden_size = 128\n[training]\ntrain_iters = 7\n[data]\nmock_data = true\n"
    )
    config = parse("--preset", "gpt2-tiny", "--config", str(file), "--num-layers", "5")
    assert (config.model.num_layers, config.model.hidden_size) == (5, 128)
    assert (config.model.num_attention_heads, config.data.seq_length, config.model.vocab_size) == (4, 64, 512)
    note = capfd.readouterr().err
    assert note == f"megacore: note: --config {file} overrides --preset gpt2-tiny: hidden_size 128 (preset: 64)\n"


def test_a_preset_in_the_file_counts_too(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[model]\npreset = "gpt2-tiny"\n[training]\ntrain_iters = 7\n[data]\nmock_data = true\n')
    assert parse("--config", str(file)).model.hidden_size == 64
    assert parse("--config", str(file), "--preset", "gpt2-small").model.hidden_size == 768


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        (["--train-iters", "20"], ["--lr-decay-iters 10", "--lr-decay-iters None", "gives 20"]),
        (["--hidden-size", "1536"], ["--ffn-hidden-size 3072", "gives 6144", "--kv-channels 64", "gives 128"]),
        (["--num-attention-heads", "24"], ["--num-query-groups 12", "gives 24", "--kv-channels 64", "gives 32"]),
        (["--train-iters", "20", "--lr-decay-iters", "None"], []),
        (["--train-iters", "10", "--lr", "1e-4"], ["--min-lr 3e-05", "gives 1e-05"]),
        (["--train-iters", "10", "--lr", "1e-4", "--min-lr", "0"], []),
        (["--seq-length", "512"], ["--max-position-embeddings 1024", "gives 512"]),
    ],
)
def test_what_a_resolved_file_keeps_although_flags_would_change_it_is_noted(
    flags: list[str], noted: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    save_toml(parse(*GOOD), file)
    capfd.readouterr()
    parse("--config", str(file), *flags)
    said = capfd.readouterr().err
    assert [word for word in noted if word not in said] == []
    assert said.count(f"megacore: note: --config {file} sets ") == len([word for word in noted if "gives" in word])


def test_a_value_that_the_file_chose_is_not_noted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[optimizer]\nlr_decay_iters = 8\n[training]\ntrain_iters = 10\n")
    parse("--config", str(file), "--mock-data", "--vocab-size", "8", "--train-iters", "20")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        (["--zero-stage", "2"], ["--zero-stage 2 changes nothing with one data-parallel rank (--dp 1)"]),
        (
            ["--schedule", "1f1b", "--pipeline-balance", "flops"],
            [
                "--schedule 1f1b changes nothing without a pipeline (--pp 1)",
                "--pipeline-balance flops changes nothing without a pipeline (--pp 1)",
            ],
        ),
        (["--zero-stage", "3", "--offload-optimizer", "--offload-params"], []),
        (["--zero-stage", "0", "--schedule", "auto"], []),
        (["--schedule", "gpipe"], []),  # all forwards before all backwards, which takes memory
    ],
)
def test_flags_that_change_nothing_on_these_ranks_are_noted(
    flags: list[str], noted: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    save_toml(parse(*GOOD, *flags), file)
    said = [line for line in capfd.readouterr().err.splitlines() if "changes nothing" in line]
    assert said == [f"megacore: note: {note}" for note in noted]
    parse("--config", str(file))  # holds values that nobody has typed
    assert "changes nothing" not in capfd.readouterr().err


def test_a_tokenizer_is_stronger_than_the_presets_vocabulary(tmp_path: Path) -> None:
    argv = ("--preset", "gpt2-tiny", "--mock-data", "--train-iters", "1", "--tokenizer", str(tmp_path))
    asked: list[Config] = []

    def vocabulary(config: Config) -> int:
        asked.append(config)
        return 777

    assert parse(*argv, vocabulary=vocabulary).model.vocab_size == 777
    assert asked[0].model.vocab_size is None


def test_a_preset_fills_nothing_that_has_no_effect_beside_what_is_given(tmp_path: Path) -> None:
    learned = parse(*GOOD, "--preset", "llama-3.2-1b", "--position-embedding-type", "learned").model
    assert (learned.rotary_base, learned.rope_scaling, learned.normalization) == (10_000.0, "none", "RMSNorm")
    plain = parse(*GOOD, "--preset", "llama-3.2-1b", "--rope-scaling", "none").model
    assert (plain.rotary_base, plain.rope_scaling_factor, plain.rope_original_max_positions) == (500_000.0, 8.0, None)


# ---- what is refused -------------------------------------------------------------------------------------------------


WRONG: list[tuple[list[str], tuple[str, ...]]] = [
    (["--num-layer", "3"], ("--num-layer is not a flag", "did you mean --num-layers?")),
    (["--tensor-parallel-size", "3"], ("did you mean --tensor-model-parallel-size?",)),
    (["--heads", "3"], ("did you mean --num-attention-heads?",)),
    (["-lr", "3"], ("-lr is not a flag: did you mean --lr?",)),
    (["--learning-rate", "3"], ("--learning-rate is not a flag: did you mean --lr?",)),
    (["--data-pth", "3"], ("--data-pth is not a flag: did you mean --data-path?",)),
    (["-x"], ("-x is not a flag", "--help")),
    (["--world_size", "8"], ("--world-size has no effect without --dry-run: add --dry-run, or leave it out",)),
    (["--cluster", "h100"], ("--cluster has no effect without --dry-run: add --dry-run",)),
    (["--no-mock-dat"], ("did you mean --no-mock-data?",)),
    (["--zzzzzz"], ("--zzzzzz is not a flag", "--help")),
    (["--swiglu", "--activation", "gelu"], ("--swiglu is --activation swiglu", "--activation gelu is given as well")),
    (["--recompute-modules", "gdn"], ("--recompute-modules gdn has no counterpart", "use --recompute selective")),
    (
        ["--no-save-optim"],
        ("--no-save-optim", "a Megatron-LM flag that megacore does not support: without it, checkpoints also hold"),
    ),
    (
        ["--fp8-format", "hybrid"],
        ("--fp8-format is a Megatron-LM flag", "use --precision bf16: megacore does not compute in fp8"),
    ),
    (["--skip-train", "--eval-interval", "0"], ("--skip-train only evaluates", "leave one of them out")),
    (["--multiple-validation-sets"], ("evaluates each dataset of --valid-data-path by itself, and there is none",)),
    (["--skip-train", "--lr-range-test"], ("--lr-range-test trains", "leave one of them out")),
    (["--decoupled-min-lr", "1e-5"], ("--decoupled-min-lr 1e-05 has no effect without --decoupled-lr",)),
    (["--decoupled-lr", "1e-5"], ("--decoupled-min-lr 3e-05, which is that of --min-lr, must be at most",)),
    (["--ckpt-step", "7"], ("--ckpt-step is a Megatron-LM flag", "use --load OUTPUT_DIR/step_NNNNNNNN")),
    (
        ["--train-weighted-split-paths", "a: 1 0:0.9 b", "--no-mock-data"],
        ("--train-weighted-split-paths is a Megatron-LM flag", "use --train-data-path WEIGHT PREFIX"),
    ),
    (["--no-lr"], ("--no-lr", "only a switch", "--lr FLOAT")),
    (["--mock-data", "True"], ("--mock-data True", "--mock-data or --no-mock-data")),
    (["--num-layers", "three"], ("--num-layers 'three' is not a whole number", "12")),
    (["--num-layers", "1.5"], ("--num-layers '1.5' is not a whole number",)),
    (["--eval-iters", "1e3"], ("--eval-iters '1e3' is not a whole number: use 1000",)),
    (["--lr="], ("--lr is empty: give it a value",)),
    (["--lr", "fast"], ("--lr 'fast' is not a number", "0.0003")),
    (["--lr", "nan"], ("--lr nan", "finite")),
    (["--lr"], ("--lr needs a value: --lr FLOAT",)),
    (["--tp", "--pp", "1"], ("--tp needs a value: --tp INT",)),
    (["--tp", "1", "2"], ("--tp 1", "'2' belongs to no flag")),
    (["--lr-decay-style", "wsd"], ("--lr-decay-style wsd", "did you mean WSD?")),
    (["--config", "/no/such/file.toml"], ("--config /no/such/file.toml", "No such file")),
    (["--config", "/"], ("--config /", "directory")),
    (["--load", "/no/such/dir"], ("--load /no/such/dir", "not a directory")),
    (["--tokenizer", "/no/such"], ("--tokenizer /no/such does not exist", "tokenizer.json")),
    (["--output-dir", "/dev/null/x"], ("--output-dir /dev/null/x", "another name")),
    (["--tp", "2"], ("--tp 2", "1 process", "start 2 processes")),
    (["--preset", "gpt3"], ("--preset gpt3", "gpt2-small")),
    (["--log-interval", "2.5"], ("--log-interval '2.5' is not a whole number: use 2 or 3",)),
    (["--tp", "1_0"], ("--tp '1_0' is not a whole number",)),
    (["--tp", "\uff12"], ("is not a whole number: use, for example, 1",)),  # full-width 2
    (["--lr", "1_0.0"], ("--lr '1_0.0' is not a number",)),
    (["--num-query-groups", "-0.5"], ("is not a whole number: write INT",)),
    (["--num-layers", "1e400"], ("is not a whole number: use, for example, 12",)),
    (["--sequence-parallel"], ("--sequence-parallel has no effect with --tp 1", "leave it out")),
    (["--trace", "--trace-steps", "10"], ("--trace-steps 10", "at most 9", "--train-iters 10")),
]


@pytest.mark.parametrize("argv, words", WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_a_wrong_flag_is_refused_by_name(argv: list[str], words: tuple[str, ...], refuse: Refuse) -> None:
    good = GOOD[1:] if {"--mock-data", "--no-mock-data"} & set(argv) else GOOD
    (problem,) = problems(refuse(*good, *argv))
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("given", "last", "note"),
    [
        ("--lr 1e-3 --lr 2e-3", "--lr 2e-3", "--lr 1e-3 is followed by --lr 2e-3, which counts"),
        (
            "--micro-batch-size 2 --log-interval 5 --micro_batch_size=1",
            "--log-interval 5",
            "--micro-batch-size 2 is followed by --micro-batch-size 1",
        ),
        ("--tensor-model-parallel-size 2 --tp 1", "", "--tensor-model-parallel-size 2 is followed by --tp 1"),
        ("--trace --no-trace", "", "--trace is followed by --no-trace, which counts"),
        ("--split 1,1,1 --split 8,1,1", "--split 8,1,1", "--split 1,1,1 is followed by"),
        ("--window-attn-skip-freq x --window-attn-skip-freq 2 --window-size 8",
         "--window-attn-skip-freq 2 --window-size 8", "--window-attn-skip-freq x is followed by"),
    ],
)  # fmt: skip
def test_the_last_of_a_repeated_flag_counts(
    given: str, last: str, note: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert parse(*GOOD, *given.split()) == parse(*GOOD, *last.split())
    assert f"megacore: note: {note}" in capfd.readouterr().err


def test_a_required_whole_number_has_no_default_to_show(refuse: Refuse) -> None:
    assert problems(refuse(*GOOD[:-1], "2.5"))[0] == "--train-iters '2.5' is not a whole number: use 2 or 3"
    assert problems(refuse(*GOOD[:-1], "ten"))[0] == "--train-iters 'ten' is not a whole number: write INT in digits"


def test_a_word_before_the_flags_belongs_to_none(refuse: Refuse) -> None:
    assert "'train' belongs to no flag" in problems(refuse("train", *GOOD))[0]


def test_all_kinds_of_problems_come_together(refuse: Refuse, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[model]\nnum_layers = '3'\n")
    text = refuse(
        *("--config", str(file), "--tokenizer", "/no", "--nope", "--tp", "x", "--lr", "-1"),
        *("--finetune", "--num-attention-heads", "5"),
    )
    found = problems(text)
    for words in (
        "num_layers",
        "/no does not",
        "--nope",
        "--tp 'x'",
        "--lr -1",
        "--finetune",
    ):
        assert any(words in problem for problem in found), words
    assert len(found) == 6 + 3  # and: the heads, the data, the number of steps
    assert f"Keys of {file} are shown as their flags" in text


def test_a_missing_file_of_settings_has_no_keys_to_explain(refuse: Refuse) -> None:
    text = refuse(*GOOD, "--config", "/no/such.toml")
    assert "/no/such.toml" in problems(text)[0]
    assert "Keys of" not in text


def test_nothing_at_all_is_refused_with_what_is_needed(refuse: Refuse) -> None:
    data, iters = problems(refuse())
    assert "--data-path" in data
    assert "--train-iters" in iters


def test_control_characters_do_not_reach_the_terminal(refuse: Refuse) -> None:
    assert "\x1b" not in refuse(*GOOD, "--preset", "\x1b[31m")


# ---- ranks -----------------------------------------------------------------------------------------------------------


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, world_size: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
    for name, value in {**place, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank, local_rank", [(1, 1), (4, 0), (5, 1)])
def test_only_rank_0_speaks(rank: int, local_rank: int, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, rank, local_rank, 8)
    assert refuse(*GOOD, "--tp", "3") == ""


def test_another_machine_names_itself_and_only_its_own_files(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 4, 0, 8)
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    text = refuse(*GOOD, "--tp", "3", "--tokenizer", "/no/such")
    assert text.startswith("megacore: refused on node7: 1 problem\n  - --tokenizer /no/such")
    as_rank(monkeypatch, 5, 1, 8)
    assert refuse(*GOOD, "--tp", "3") == ""


def test_a_silent_rank_waits_for_the_one_that_speaks(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 3, 3, 4)
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    refuse(*GOOD, "--tp", "3")
    assert len(slept) == 1


def test_the_launcher_is_told_the_cause(refuse: Refuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    text = refuse(*GOOD, "--tp", "3")
    cause = json.loads(file.read_text())["message"]
    assert cause["message"] == cause["extraInfo"]["py_callstack"] == text.rstrip("\n")
    assert int(cause["extraInfo"]["timestamp"]) == pytest.approx(time.time(), abs=60)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "such"))
    assert problems(refuse(*GOOD, "--tp", "3"))


def test_the_launcher_never_reads_a_part_of_the_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    leave_for_launcher("first")
    with file.open() as being_read:
        leave_for_launcher("second")
        assert json.load(being_read)["message"]["message"] == "first"
    assert json.loads(file.read_text())["message"]["message"] == "second"
    assert list(tmp_path.iterdir()) == [file]


BROKEN_PLACES = [("RANK", "x"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-4"), ("RANK", "7")]
BROKEN_MEETINGS = [("MASTER_ADDR", ""), ("MASTER_PORT", ""), ("MASTER_PORT", "x"), ("MASTER_PORT", "70000")]


@pytest.mark.parametrize("name, value", BROKEN_PLACES + BROKEN_MEETINGS)
def test_a_broken_environment_is_named(name: str, value: str, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 0, 0, 4)
    monkeypatch.setenv(name, value)
    text = refuse(*GOOD)
    assert name in text
    assert "torchrun" in text


def test_a_rank_beyond_the_world_reports_itself(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 7, 7, 4)
    (problem,) = problems(refuse(*GOOD))
    assert "RANK 7 must be below WORLD_SIZE 4" in problem


def test_an_address_that_cannot_be_resolved_is_refused(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(cli, "NAME_SECONDS", 0.0)
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    as_rank(monkeypatch, 0, 0, 2)
    monkeypatch.setenv("MASTER_ADDR", "no-such-node")
    (problem,) = problems(refuse(*GOOD))
    assert "MASTER_ADDR 'no-such-node' cannot be resolved: Name or service not known" in problem


def test_sequence_parallelism_of_a_resolved_file_does_not_hinder_one_rank(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[parallel]\nsequence_parallel = true\n")
    assert parse(*GOOD, "--config", str(file)).parallel.tp == 1


def test_the_inputs_complete_and_check_the_configuration(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ResolvedConfig] = []

    def unreadable(config: Config) -> int:
        raise DataError("tok.json is not a tokenizer\ngive another")

    def refused(config: Config) -> None:
        raise ConfigError(["first", "second"])

    assert parse(*GOOD, vocabulary=lambda config: 64, checks=[seen.append]) == seen[0] == parse(*GOOD)
    assert "  - tok.json is not a tokenizer\n    give another\n" in refuse(*GOOD, vocabulary=unreadable)
    assert "refused: 3 problems" in refuse(*GOOD, vocabulary=unreadable, checks=[refused])
    assert "refused: 1 problem\n" in refuse(*GOOD, vocabulary=unreadable, checks=[unreadable])
    assert problems(refuse(*GOOD, checks=[refused])) == ["first", "second"]
    as_rank(monkeypatch, 1, 1, 2)
    parse(*GOOD, checks=[refused])  # not this rank's to check
    assert refuse(*GOOD, vocabulary=unreadable) == ""
    assert len(seen) == 1


def test_checks_run_without_a_vocabulary_that_cannot_be_read(refuse: Refuse, tmp_path: Path) -> None:
    seen: list[ResolvedConfig] = []

    def unreadable(config: Config) -> int:
        raise DataError("no tokenizer")

    argv = ("--mock-data", "--train-iters", "1", "--tokenizer", str(tmp_path))
    assert problems(refuse(*argv, vocabulary=unreadable, checks=[seen.append])) == ["no tokenizer"]
    assert seen[0].model.vocab_size == UNKNOWN_VOCAB_SIZE
    assert seen[0].training.global_batch_size == 1


# ---- the process -----------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from megacore.config import Config, ResolvedConfig
from megacore.config.cli import parse_config
try:
    parse_config(sys.argv[1:], prog="pretrain_gpt.py", description="Pretrain a GPT.", kind=Config)
finally:
    print("loaded:", sorted({"torch", "numpy"} & set(sys.modules)))
"""


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=patience(60),
    )


def test_a_refusal_is_quick_and_loads_nothing() -> None:
    start = time.monotonic()
    done = run(*GOOD, "--tp", "3", "--nope")
    assert time.monotonic() - start < patience(3)
    assert done.returncode == 2
    assert done.stdout == "loaded: []\n"
    assert "Traceback" not in done.stderr
    assert len(problems(done.stderr)) == 2


def test_help_is_printed_once_and_names_every_flag() -> None:
    done = run("--help", "all", COLUMNS="100")
    assert done.returncode == 0
    words = set(re.split(r"[\s,]+", done.stdout))
    for name, others in flag_names().items():
        assert {name, *others} <= words
    for section, kind in SECTIONS.items():
        assert f"[{section}]\n" in done.stdout, kind
    assert "Default: 768." in done.stdout
    assert "Required." in done.stdout
    assert "--tp, --tensor-model-parallel-size INT\n" in done.stdout
    assert done.stdout.endswith("loaded: []\n")
    other = run("--help", RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert (other.returncode, other.stdout) == (0, "loaded: []\n")


def test_help_into_a_closed_pipe_ends_quietly() -> None:
    command = f"{shlex.quote(sys.executable)} pretrain_gpt.py --help all | true"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=patience(60),
    )
    assert (done.returncode, done.stderr) == (0, "")
