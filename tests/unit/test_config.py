"""The configuration itself: wrong ones are refused by flag and with the way out, right ones resolved and saved."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Annotated, Any

import pytest

from megacore.config import SECTIONS, Config, cli, validate
from megacore.config import toml as config_file
from megacore.config.cli import load_toml, parse_config, save_toml
from megacore.config.fields import FieldInfo, Range, Section, field_docs, field_infos
from megacore.config.flags import all_fields, flags_by_name
from megacore.config.messages import divisors, nearest_multiples, nearest_name, one_of
from megacore.config.optimizers import OPTIMIZERS
from megacore.config.presets import GPT_PRESETS

GOOD: dict[str, Any] = {"train_iters": 100, "mock_data": True, "vocab_size": 64}


def make(**values: Any) -> Config:
    """A configuration from values by field, over one that is valid."""
    values = {**GOOD, **values}
    sections = {
        name: section(**{key: values[key] for key in field_infos(section) if key in values})
        for name, section in SECTIONS.items()
    }
    return Config(**sections)  # type: ignore[arg-type]


# Values, the number of processes, and words that the one problem must hold: the flags, the constraint, the way out.
WRONG: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    (
        {"tp": 3, "hidden_size": 768, "num_attention_heads": 16},
        3,
        ("--tp 3 must divide --num-attention-heads 16: use 1",),
    ),
    ({"hidden_size": 100}, 1, ("--hidden-size 100", "--num-attention-heads 12", "96 or 108", "10")),
    ({"tp": 4, "ffn_hidden_size": 1002}, 4, ("--tp 4", "--ffn-hidden-size 1002", "1000 or 1004", "--tp 1 or 2,")),
    ({"pp": 8, "num_layers": 6}, 8, ("--pp 8", "--num-layers 6", "use 1, 2 or 4,", "8 or more")),
    (
        {"global_batch_size": 10, "micro_batch_size": 4, "dp": 2},
        2,
        ("--global-batch-size 10", "--micro-batch-size 4 x --dp 2", "use 8 or 16"),
    ),
    ({"global_batch_size": 3, "micro_batch_size": 4}, 2, ("--global-batch-size 3", "--dp 2 (derived)", "use 8")),
    ({"seq_length": 2048, "max_position_embeddings": 1024}, 1, ("--seq-length 2048", "1024 or less", "2048 or more")),
    ({"tp": 2, "pp": 2, "dp": 2}, 6, ("--tp 2 x --pp 2 x --dp 2 = 8", "6 processes", "start 8", "--tp 1 --pp 3")),
    ({"tp": 2, "dp": 3}, 8, ("--tp 2 x --pp 1 x --dp 3 = 6", "use --dp 4", "leave --dp out", "start 6")),
    ({"tp": 3}, 8, ("--tp 3 x --pp 1", "8 processes", "--tp 1, 2 or 4,", "start 6 or 9")),
    ({"tp": 2, "pp": 3}, 8, ("--tp 2 x --pp 3 = 6", "use --pp 1, 2 or 4,", "start 6 or 12")),
    ({"tp": 2}, 1, ("--tp 2 x --pp 1", "1 process:", "use --tp 1", "start 2 processes")),
    ({"num_layers": 0}, 1, ("--num-layers 0", "use 1 to 10000")),
    ({"train_iters": 2**40}, 1, (f"--train-iters {2**40}", f"{2**31 - 1} or less")),
    ({"tp": -2}, 1, ("--tp -2 must be at least 1: use 1",)),
    ({"dp": 0}, 1, ("--dp 0 must be at least 1: use 1,", "leave the flag out")),
    ({"vocab_size": 0}, 1, ("--vocab-size 0", "use 1 to ")),
    ({"lr": 0.0}, 1, ("--lr 0 must be above 0: use, for example, 0.0003 (the default)",)),
    ({"zero_stage": 9, "dp": 2}, 2, ("--zero-stage 9 must be at least 0 and at most 3: use 0, 1, 2 or 3",)),
    ({"micro_batch_size": 0}, 1, ("--micro-batch-size 0 must be at least 1 and at most 1000000: use 1 to 1000000",)),
    ({"lr": math.nan}, 1, ("--lr nan", "finite", "0.0003")),
    ({"clip_grad": math.inf}, 1, ("--clip-grad inf", "finite", "1 (the default)")),
    ({"clip_grad": -1.0}, 1, ("--clip-grad -1", "0 or more")),
    ({"min_lr": 1.0}, 1, ("--min-lr 1 ", "--lr 0.0003", "0.0003 or less")),
    ({"hidden_dropout": 1.0}, 1, ("--hidden-dropout 1 ", "below 1", "use, for example, 0 (")),
    ({"attention_dropout": -0.1}, 1, ("--attention-dropout -0.1", "0 or more")),
    ({"adam_beta1": 1.0}, 1, ("--adam-beta1 1 ", "below 1", "0.9")),
    ({"adam_beta2": 1.5}, 1, ("--adam-beta2 1.5", "below 1", "0.95")),
    ({"adam_eps": 0.0}, 1, ("--adam-eps 0 ", "above 0", "1e-08")),
    ({"weight_decay": -0.01}, 1, ("--weight-decay -0.01", "0 or more")),
    ({"sgd_momentum": 1.0}, 1, ("--sgd-momentum 1 ", "below 1")),
    ({"label_smoothing": 1.0}, 1, ("--label-smoothing 1 ", "below 1")),
    ({"z_loss": -1.0}, 1, ("--z-loss -1", "0 or more")),
    ({"norm_epsilon": 0.0}, 1, ("--norm-epsilon 0", "above 0")),
    ({"init_method_std": 0.0}, 1, ("--init-method-std 0", "above 0")),
    ({"bucket_size_mb": 0.0}, 1, ("--bucket-size-mb 0", "above 0", "25")),
    ({"bucket_size_mb": 1e30}, 1, ("--bucket-size-mb 1e+30", "above 0", "65536 or less")),
    ({"initial_loss_scale": 1024.0}, 1, ("--initial-loss-scale 1024 has no effect", "--precision fp16")),
    ({"min_loss_scale": 2.0}, 1, ("--min-loss-scale 2 has no effect", "--precision fp16")),
    ({"loss_scale_window": 7}, 1, ("--loss-scale-window 7 has no effect", "--precision fp16")),
    ({"precision": "bf16", "hysteresis": 3}, 1, ("--hysteresis 3 has no effect with --precision bf16",)),
    ({"precision": "fp16", "loss_scale": 1e39}, 1, ("--loss-scale 1e+39", "1e+38 or less")),
    ({"precision": "fp16", "initial_loss_scale": 1e39}, 1, ("--initial-loss-scale 1e+39", "1e+38 or less")),
    ({"precision": "fp16", "min_loss_scale": 1e-40}, 1, ("--min-loss-scale 1e-40", "1e-37 or more")),
    *(
        ({"precision": "fp16", "loss_scale": 128.0, name: value}, 1, (f"{said} has no effect with --loss-scale 128",))
        for name, value, said in (
            ("initial_loss_scale", 4.0, "--initial-loss-scale 4"),
            ("hysteresis", 5, "--hysteresis 5"),
            ("loss_scale_window", 7, "--loss-scale-window 7"),
            ("min_loss_scale", 2.0, "--min-loss-scale 2"),
        )
    ),
    (
        {"num_layers": 4, "recompute": "full", "recompute_num_layers": 5},
        1,
        ("--recompute-num-layers 5 must be at most --num-layers 4", "4 or less"),
    ),
    ({"sgd_momentum": 0.5}, 1, ("--sgd-momentum 0.5 has no effect with --optimizer adamw", "--optimizer sgd")),
    ({"distributed_timeout_minutes": 1e-9}, 1, ("--distributed-timeout-minutes 1e-09", "use 0.05 to 10080")),
    ({"num_layers": 100_000_000}, 1, ("--num-layers 100000000", "10000 or less")),
    ({"hidden_size": 12_000_000}, 1, ("--hidden-size 12000000", "use 999960, 999972, 999984 or 999996")),
    ({"global_batch_size": 2_000_000_000}, 1, ("--global-batch-size 2000000000", "1000000 or less")),
    ({"distributed_timeout_minutes": 1e300}, 1, ("--distributed-timeout-minutes 1e+300", "10080 or less")),
    ({"train_iters": 0}, 1, ("--train-iters 0", "1 or more")),
    ({"train_iters": None}, 1, ("--train-iters", "missing", "--train-iters INT")),
    ({"seed": -1}, 1, ("--seed -1", "0 or more")),
    ({"eval_iters": -1}, 1, ("--eval-iters -1", "0 or more")),
    ({"eval_iters": 0, "skip_train": True}, 1, ("--skip-train", "--eval-iters 0")),
    ({"eval_interval": -1}, 1, ("--eval-interval -1", "0 or more")),
    ({"log_interval": 0}, 1, ("--log-interval 0", "1 or more")),
    ({"save_interval": 0}, 1, ("--save-interval 0", "1 or more", "leave the flag out")),
    ({"num_workers": -1}, 1, ("--num-workers -1", "use 0 to 64")),
    ({"num_workers": 1000}, 1, ("--num-workers 1000", "64 or less")),
    ({"lr_warmup_iters": 100}, 1, ("--lr-warmup-iters 100", "--train-iters 100", "99 or less")),
    ({"lr_warmup_iters": 60, "lr_decay_iters": 50}, 1, ("--lr-warmup-iters 60", "--lr-decay-iters 50", "49 or less")),
    ({"lr_decay_style": "WSD"}, 1, ("--lr-decay-style WSD", "--lr-wsd-decay-iters")),
    ({"lr_wsd_decay_iters": 10}, 1, ("--lr-wsd-decay-iters 10 has no effect", "cosine", "--lr-decay-style WSD")),
    (
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 95, "lr_warmup_iters": 10},
        1,
        ("--lr-warmup-iters 10 + --lr-wsd-decay-iters 95 = 105", "--train-iters 100", "90 or less"),
    ),
    ({"lr_decay_style": "cosin"}, 1, ("--lr-decay-style cosin", "linear", "did you mean cosine?")),
    ({"optimizer": "adagrad"}, 1, ("--optimizer adagrad", one_of(list(OPTIMIZERS)))),
    ({"preset": "gpt2-mdium"}, 1, ("--preset gpt2-mdium", "did you mean gpt2-medium?")),
    ({"split": "a,b"}, 1, ("--split a,b", "949,50,1")),
    ({"split": "1,2,3,4"}, 1, ("--split 1,2,3,4", "one to three")),
    ({"split": "0,1"}, 1, ("--split 0,1", "nothing to train on")),
    ({"split": "1e308,1e308"}, 1, ("--split 1e308,1e308", "nothing to train on")),
    ({"split": "1,-1"}, 1, ("--split 1,-1", "0 or more")),
    ({"split": "nan"}, 1, ("--split nan", "949,50,1")),
    ({"split": " "}, 1, ("--split is empty",)),
    ({"mock_data": False}, 1, ("--data-path", "missing", "--mock-data")),
    ({"data_path": ("a",)}, 1, ("--mock-data", "--data-path a", "exclude each other")),
    ({"vocab_size": None}, 1, ("--mock-data", "--tokenizer PATH or --vocab-size N")),
    ({"mock_data": False, "data_path": ("a",), "vocab_size": None}, 1, ("--data-path needs", "--tokenizer PATH")),
    ({"mock_data": False, "data_path": ("0.5", "a", "b")}, 1, ("--data-path 0.5 a b", "WEIGHT PREFIX")),
    *(
        ({"mock_data": False, "data_path": (weight, "a", "0.5", "b")}, 1, (f"--data-path {weight} a 0.5 b", said))
        for weight, said in [(one, "not a finite number above 0") for one in ("0", "-1", "nan", "inf", "1e-400")]
    ),
    *(
        ({"mock_data": False, "data_path": (one, "a", two, "b")}, 1, (f"{one} a {two} b has weights whose sum", "use"))
        for one, two in (("1e308", "1e308"), ("1e-320", "1e308"))
    ),
    ({"mock_data": False, "data_path": ("a", "")}, 1, ("--data-path is empty",)),
    ({"eod_mask_loss": True}, 1, ("--eod-mask-loss", "--tokenizer")),
    (
        {"schedule_csv": "f.csv", "schedule": "gpipe"},
        1,
        ("--schedule gpipe has no effect", "--schedule-csv f.csv", "out"),
    ),
    (
        {"pipeline_layout": "E,12*t,H", "pipeline_balance": "flops"},
        1,
        ("--pipeline-balance flops has no effect", "--pipeline-layout E,12*t,H", "leave it out"),
    ),
    ({"output_dir": ""}, 1, ("--output-dir is empty",)),
    ({"output_dir": "\udcff"}, 1, (r"--output-dir '\udcff' is not valid UTF-8",)),
]


@pytest.mark.parametrize("values, world_size, words", WRONG, ids=[" ".join(map(str, w[0].items())) for w in WRONG])
def test_a_wrong_configuration_is_refused_by_name(
    values: dict[str, Any], world_size: int, words: tuple[str, ...]
) -> None:
    (problem,) = validate(make(**values), world_size)
    assert all(word in problem for word in words), problem


def test_all_problems_come_at_once_and_none_hides_another() -> None:
    wrong = make(tp=5, pp=20, lr=-1.0, seed=-1, split="x", seq_length=10, max_position_embeddings=5, hidden_size=0)
    problems = validate(wrong, 8)
    for flag in ("--tp 5", "--pp 20", "--lr -1", "--seed -1", "--split x", "--seq-length 10", "--hidden-size 0"):
        assert any(flag in problem for problem in problems), flag
    assert len(problems) == 8  # --tp violates two: the heads, and the processes


def test_what_cannot_be_compared_is_not_reported_twice() -> None:
    assert len(validate(make(tp=0, num_attention_heads=0, hidden_size=0, micro_batch_size=0, train_iters=0), 4)) == 5


def test_unread_fields_cause_no_further_problems() -> None:
    config = make(train_iters=None, data_path=(), mock_data=False)
    assert validate(config, 1, unread=frozenset({"train_iters", "data_path"})) == []


def test_everything_at_zero_or_negative_or_not_a_number_is_refused_without_an_exception() -> None:
    for value in (0, -1, -(2**70), 2**70, math.nan, math.inf, -math.inf):
        numbers = {n: value for n, i in all_fields().items() if i.kind in (int, float) and not i.choices}
        problems = validate(make(**numbers), 8)
        assert len(problems) >= (15 if value == 0 else 25), problems


def test_uneven_layers_and_vocabularies_are_fine() -> None:
    assert validate(make(num_layers=7, pp=4, tp=4, vocab_size=50257), 16) == []


def test_resolve_fills_what_follows() -> None:
    config = make(tp=2, pp=2, micro_batch_size=3).resolve(12)
    assert config.parallel.dp == 3
    assert config.model.ffn_hidden_size == 4 * 768
    assert config.model.max_position_embeddings == config.data.seq_length == 1024
    assert config.training.global_batch_size == 9
    assert config.optimizer.lr_decay_iters == 100
    assert config.resolve(12) == config
    assert validate(config, 12) == []


def test_blends_and_splits_are_read() -> None:
    assert make(data_path=("a", "b")).data.blend() == (("a", "b"), None)
    assert make(data_path=("0.25", "a", "3", "b")).data.blend() == (("a", "b"), (0.25, 3.0))
    assert make(data_path=("2024",)).data.blend() == (("2024",), None)
    assert make(split="3, 1").data.split_shares() == (0.75, 0.25, 0.0)
    assert sum(make(split="949,50,1").data.split_shares()) == pytest.approx(1.0, abs=1e-15)


def random_value(info: FieldInfo, rng: random.Random) -> Any:
    """A value that the field alone accepts."""
    if info.optional and rng.random() < 0.3:
        return None
    if info.choices:
        return rng.choice(info.choices)
    if info.kind is bool:
        return rng.random() < 0.5
    if info.kind is int:
        return rng.randint(1, 10 ** rng.randint(1, 9))
    if info.kind is float:
        return rng.choice([rng.random() * 0.999 + 1e-9, 10 ** rng.uniform(-12, -1), 1e-8, 1 / 3])
    texts = [
        rng.choice(['a "b"', "c\\d", "é/ü", "tab\tand\nline", "#", "'", "=[x]", "\u2028", "\x7f"]) for _ in range(3)
    ]
    return tuple(texts[: rng.randint(0, 3)]) if info.kind is tuple else "".join(texts)


def test_saved_configurations_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "config.toml"
    for seed in range(100):
        rng = random.Random(seed)
        values = {name: random_value(info, rng) for name, info in all_fields().items() if name != "preset"}
        sections: dict[str, Any] = {
            name: section(**{key: values[key] for key in field_infos(section) if key in values})
            for name, section in SECTIONS.items()
        }
        config = Config(**sections)
        save_toml(config, path)
        assert _read_without_checks(path) == config
    assert [file.name for file in path.parent.iterdir()] == ["config.toml"]


def _read_without_checks(path: Path) -> Config:
    given = config_file.read_toml(path)
    assert given.problems == []
    return cli._build(Config, given.values)


@pytest.mark.parametrize("preset", [None, *GPT_PRESETS])
def test_a_resolved_configuration_given_back_is_equal(preset: str | None, tmp_path: Path) -> None:
    rng = random.Random(str(preset))
    for _ in range(10):
        argv = ["--mock-data", "--train-iters", str(rng.randint(2, 9)), "--lr", repr(rng.random())]
        argv += ["--preset", preset] if preset else ["--vocab-size", "17"]
        argv += rng.choice([[], ["--hidden-dropout", "0"], ["--num-layers", "5"], ["--adam-eps", "1e-12"]])
        first = parse_config(argv, prog="x", description="x", kind=Config)
        save_toml(first, tmp_path / "config.toml")
        assert (
            parse_config(["--config", str(tmp_path / "config.toml")], prog="x", description="x", kind=Config) == first
        )
        assert load_toml(tmp_path / "config.toml").resolve(1) == first


def test_the_saved_file_says_which_version_wrote_it_and_is_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    save_toml(make(), path)
    before = path.read_text()
    assert before.startswith("# megacore 0.")
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_toml(make(seed=99), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


# ---- the fields themselves -------------------------------------------------------------------------------------------


def test_every_field_is_documented_and_named_once() -> None:
    names = [name for section in SECTIONS.values() for name in field_infos(section)]
    assert len(names) == len(set(names))
    flags = [flag for info in all_fields().values() for flag in info.flags]
    assert len(flags) == len(set(flags))
    for section in SECTIONS.values():
        docs = field_docs(section)
        assert docs.keys() == field_infos(section).keys()
        assert all(doc.endswith(".") and len(doc) > 20 for doc in docs.values())


def test_every_number_has_a_range_that_holds_its_default() -> None:
    for info in all_fields().values():
        if info.kind in (int, float):
            assert info.range is not None, info.name
            if isinstance(info.default, int | float):
                assert info.default in info.range, info.name


@pytest.mark.parametrize("preset", GPT_PRESETS)
def test_presets_are_valid_whole_shapes(preset: str) -> None:
    assert GPT_PRESETS[preset].keys() <= all_fields().keys()
    assert validate(make(**{"preset": preset, **GPT_PRESETS[preset]}), 1) == []


def test_the_small_preset_is_the_124m_model() -> None:
    model = make(**GPT_PRESETS["gpt2-small"]).resolve(1).model
    hidden, layers = model.hidden_size, model.num_layers
    assert model.vocab_size is not None
    assert model.max_position_embeddings is not None
    block = 12 * hidden**2 + 13 * hidden  # weights; biases and two norms
    assert (model.vocab_size + model.max_position_embeddings + 2) * hidden + layers * block == 124_439_808


def test_configurations_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().model.num_layers = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SECTIONS["parallel"](2)  # type: ignore[call-arg]


def test_divisors_and_multiples_by_brute_force() -> None:
    for n in range(1, 200):
        assert divisors(n, most=n) == [d for d in range(1, n + 1) if n % d == 0]
        for of in range(1, 20):
            near = nearest_multiples(n, of)
            assert all(m % of == 0 and m > 0 for m in near)
            if n % of:
                assert near == [m for m in range(1, 2 * n + of) if m % of == 0 and abs(m - n) < of]


def test_a_rollback_needs_a_checkpoint_and_a_second_bad_step() -> None:
    problems = validate(make(on_spike="rollback", max_bad_steps=1), 1)
    assert [problem.partition(":")[0] for problem in problems] == [
        "--on-spike rollback needs checkpoints to return to",
        "--on-spike rollback needs --max-bad-steps 2 or more",
    ]


def test_checks_and_guards_beyond_the_run_are_refused_all_at_once() -> None:
    wrong = {"replay_interval": 50, "check_replicas_interval": 60, "on_spike": "rollback", "save_interval": 40}
    more = {"spike_skip_batches": 70, "max_rollbacks": 80, "spike_window": 200, "lr_warmup_iters": 5}
    assert [problem.partition(":")[0] for problem in validate(make(**wrong, **more, train_iters=40), 1)] == [
        "--replay-interval 50 must be at most --train-iters 40, because no step would be replayed",
        "--check-replicas-interval 60 must be at most --train-iters 40, because only saves would be checked",
        "--on-spike rollback has no effect in 40 steps (--train-iters)",
        "--save-interval 40 must be below --train-iters 40 with --on-spike rollback, because there would be no "
        "checkpoint to return to",
        "--spike-skip-batches 70 must be at most --train-iters 40",
        "--max-rollbacks 80 must be at most --train-iters 40",
    ]
    within = {"replay_interval": 40, "check_replicas_interval": 40, "on_spike": "rollback", "save_interval": 39}
    more = {"spike_skip_batches": 40, "max_rollbacks": 40, "spike_window": 79, "lr_warmup_iters": 5}
    assert validate(make(**within, **more, train_iters=40), 1) == []


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"on_spike": "skip"}, "use --spike-window 79 or less, or a larger --train-iters"),
        ({"spike_window": 80}, "use --spike-window 79 or less, or a larger --train-iters"),
        ({"on_spike": "skip", "spike_window": 4, "train_iters": 2}, "use a larger --train-iters"),
        (
            {"on_spike": "skip", "spike_window": 4, "lr_warmup_iters": 40, "lr_decay_iters": 90},
            "use a smaller one, or a larger --train-iters",
        ),
    ],
    ids=str,
)
def test_a_guard_that_never_begins_is_refused(changes: dict[str, Any], way_out: str) -> None:
    (problem,) = validate(make(**{"train_iters": 40, "lr_warmup_iters": 0} | changes), 1)
    assert problem.endswith(way_out)


def test_a_run_that_resumes_can_return_to_the_checkpoint_it_loaded() -> None:
    changes = {"on_spike": "rollback", "save_interval": 400, "train_iters": 400, "load": "run"}
    assert validate(make(**changes), 1) == []


def test_a_number_that_is_none_and_a_name_that_no_file_has_are_refused() -> None:
    assert validate(make(min_lr=math.inf, output_dir="a\0b", data_path=("c\0",), mock_data=False), 1) == [
        "--data-path 'c\\x00' has a null byte, which no name of a file has: use another name",
        "--min-lr inf is not a finite number: give a number that is at least 0",
        "--output-dir 'a\\x00b' has a null byte, which no name of a file has: use another name",
    ]


def test_trace_steps_without_trace_are_refused() -> None:
    message = "--trace-steps 5 has no effect without --trace: leave it out, or use --trace"
    assert validate(make(trace_steps=5), 1) == [message]
    assert validate(make(trace_steps=5, trace=True), 1) == []


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Small(Section):
    """A section whose field has few values and may be left out."""

    few: Annotated[int | None, Range(1, 3)] = None
    """A number."""


def test_a_flag_of_few_values_may_be_left_out() -> None:
    said = "--few 0 must be at least 1 and at most 3: use 1, 2 or 3, or leave the flag out"
    assert _Small(few=0).wrong_fields() == {"few": said}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--tie-embeddings", "--untie-embeddings-and-output-weights"),
        ("--num-kv-heads", "--num-attention-heads"),
        ("--max-length", "--seq-length"),
        ("--router-topk", "--moe-router-topk"),
        ("--aux-loss", "--moe-aux-loss-coeff"),
        ("--layernorm-eps", "--layernorm-epsilon"),
        ("--init-std", "--init-method-std"),
        ("--rope-long-factor", "--rope-long-factors"),
        ("--tensormodelparallelsize", "--tensor-model-parallel-size"),
        ("--zero-optimization", None),
        ("--zero-offload-everything", None),
    ],
)
def test_a_name_is_compared_as_a_whole_and_by_words(name: str, meant: str | None) -> None:
    assert nearest_name(name, flags_by_name(Config)) == meant


def test_an_equal_word_counts_more_than_a_similar_one() -> None:
    assert nearest_name("heads", ["v-head-dim", "num-attention-heads"]) == "num-attention-heads"
    assert nearest_name("optimizer.learning_rate", ["optimizer.rate", "a.learning_ratio"]) == "optimizer.rate"
    assert nearest_name("100", ["a100", "h200"]) == "a100"
    assert nearest_name("anything", []) is None
