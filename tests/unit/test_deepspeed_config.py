"""DeepSpeed's configuration files and Megatron-DeepSpeed's flags: what they give here, and what each refusal names."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.config import OptimizerConfig
from megacore.config.bert import BertConfig
from megacore.config.cli import flag_names
from megacore.config.deepspeed_flags import DEEPSPEED_FLAGS
from megacore.config.deepspeed_keys import ALIASES, KEYS
from megacore.config.flags import all_fields
from megacore.config.megatron_flags import FOREIGN
from megacore.optim.lr_schedules import learning_rate, momentum
from tests.unit import refusals
from tests.unit.refusals import GOOD, Refuse, parse, problems
from tools import deepspeed_reference

alone, refuse = refusals.alone, refusals.refuse  # fixtures
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "coming-from-deepspeed.md"
FP32 = ["--precision", "fp32"]


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


def words(text: str) -> list[str]:
    return text.split()


def written(path: Path, document: Any) -> list[str]:
    """The flags that name a file with this content."""
    file = path / "ds_config.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return ["--deepspeed_config", str(file)]


# ---- the table


def test_every_key_of_deepspeed_is_in_the_table() -> None:
    known = json.loads((Path(__file__).parent / "deepspeed_keys.json").read_text())
    assert len(known) > 300
    former = {"cuda_visible_devices", "fp32_allreduce", "aio.thread_count"}
    former |= {f"compile.{name}" for name in ("enabled", "backend", "kwargs")}
    assert set(known) - ALIASES.keys() == KEYS.keys() - former


def test_the_tables_in_the_documentation_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert deepspeed_reference.main(["--check", str(PAGE)]) == 0, capsys.readouterr().out


def test_keys_and_flags_name_fields_and_flags_that_exist() -> None:
    fields = all_fields(BertConfig).keys()
    ours = {name for main, others in flag_names(BertConfig).items() for name in (main, *others)}
    planned = {"--search", "--world-size", "--cluster", "--max-micro-batch-size", "--max-zero-stage", "--to"}
    for path, key in KEYS.items():
        assert set(key.fields) <= fields, path
        assert set(re.findall(r"--[a-z][a-z0-9-]+", key.becomes)) <= ours | planned, path
    for name, flag in DEEPSPEED_FLAGS.items():
        assert set(flag.fields) <= fields, name
        assert set(re.findall(r"--[a-z][a-z0-9-]+", flag.becomes)) <= ours, name
    assert not DEEPSPEED_FLAGS.keys() & (ours | FOREIGN.keys())


# ---- what files give


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("document", "ours"),
    [
        ({}, FP32),
        ({"train_batch_size": 16}, [*FP32, "--global-batch-size", "16", "--micro-batch-size", "4"]),
        (
            {"train_batch_size": 16, "gradient_accumulation_steps": 2},
            [*FP32, "--global-batch-size", "16", "--micro-batch-size", "2"],
        ),
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "pipeline": {"stages": 2}},
            [*FP32, "--micro-batch-size", "2", "--global-batch-size", "12", "--pp", "2"],
        ),
        (
            {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 4}},
            [*FP32, "--micro-batch-size", "2", "--tp", "4"],
        ),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 3}}, ["--precision", "bf16"]),
        ({"bfloat16": {"enabled": True}}, ["--precision", "bf16"]),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 16, "hysteresis": 2}},
            ["--precision", "fp16", "--loss-scale", "128"],
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 2, "loss_scale_window": 7}},
            words("--precision fp16 --initial-loss-scale 64 --min-loss-scale 2 --loss-scale-window 7"),
        ),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e7}},
            [*FP32, "--zero-stage", "3", "--bucket-size-mb", "1907.35"],
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": False}},
            [*FP32, *words("--zero-stage 2 --offload-optimizer --no-overlap-grad-reduce --no-overlap-param-gather")],
        ),
        ({"zero_optimization": True}, [*FP32, "--zero-stage", "1"]),
        ({"gradient_clipping": 0.5, "communication_data_type": "bf16"},
         [*FP32, "--clip-grad", "0.5", "--grad-reduce-dtype", "bf16"]),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.8, 0.98], "eps": 1e-6}}},
            [*FP32, *words("--lr 2e-4 --adam-beta1 0.8 --adam-beta2 0.98 --adam-eps 1e-6 --weight-decay 0"),
             "--lr-decay-style", "constant"],
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "weight_decay": 0.1}}},
            [*FP32, *words("--lr 1e-3 --adam-beta2 0.999 --weight-decay 0.1 --lr-decay-style constant")],
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            [*FP32, *words("--optimizer adam --lr 1e-3 --adam-beta2 0.999 --lr-decay-style constant")],
        ),
        (
            {"optimizer": {"type": "Lion", "params": {"betas": [0.8, 0.9]}},
             "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5, "warmup_num_steps": 4}}},
            [*FP32, *words("--optimizer lion --lr 1e-4 --lion-beta1 0.8 --lion-beta2 0.9 --weight-decay 0"),
             *words("--lr-decay-style constant --lr-warmup-iters 4 --lr-warmup-style log --lr-warmup-init 1e-5")],
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}},
            [*FP32, *words("--optimizer sgd --lr 0.1 --sgd-momentum 0.5 --weight-decay 0 --lr-decay-style constant")],
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 5,
                                                               "warmup_type": "linear", "total_num_steps": 10}}},
            [*FP32, *words("--lr 3e-3 --lr-warmup-iters 5 --lr-decay-iters 10 --lr-decay-style linear --min-lr 0")],
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 5e-4}},
             "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "warmup_type": "linear",
                                                               "total_num_steps": 10}}},
            [*FP32, *words("--lr 1e-3 --lr-warmup-iters 5 --lr-decay-iters 10 --lr-decay-style linear --min-lr 0"),
             *words("--optimizer adamw --adam-beta2 0.999 --weight-decay 0")],
        ),
        (
            {"activation_checkpointing": {"partition_activations": True},
             "pipeline": {"activation_checkpoint_interval": 1}},
            [*FP32, *words("--recompute full")],
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 2e-4}},
             "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5, "total_num_steps": 9,
                                                                "cos_min_ratio": 0.5}}},
            [*FP32, *words("--lr 2e-4 --adam-beta2 0.999 --weight-decay 0 --lr-warmup-iters 5 --lr-warmup-style log"),
             *words("--lr-decay-iters 9 --lr-decay-style cosine --min-lr 1e-4")],
        ),
        (
            {"pipeline": {"stages": 4, "partition": "uniform", "activation_checkpoint_interval": 1}},
            [*FP32, *words("--pp 4 --pipeline-balance uniform --recompute full")],
        ),
        (
            {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}},
            FP32,
        ),
        (
            {"tensorboard": {"enabled": True, "output_path": "logs", "job_name": "a"}, "steps_per_print": 3,
             "wandb": {"enabled": True, "team": "t"}, "csv_monitor": {"enabled": True}},
            [*FP32, *words("--tensorboard-dir logs/a --log-interval 3 --wandb-project deepspeed --wandb-entity t"),
             "--csv"],
        ),
        (
            {"flops_profiler": {"enabled": True, "profile_step": 4}, "wall_clock_breakdown": True,
             "checkpoint": {"writer": {"type": "fast", "decoupled": True}}, "compile": {"deepcompile": True}},
            [*FP32, *words("--profile-steps 4:4 --trace --async-save --compile")],
        ),
        (
            {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": "auto"},
             "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}, "gradient_clipping": "auto",
             "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
             "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}}},
            words("--zero-stage 1 --lr 1e-3 --adam-beta2 0.999 --weight-decay 0 --lr-decay-style constant"),
        ),
        (
            {"optimizer": {"type": "Lamb", "params": {"lr": 2e-3, "max_coeff": 5.0}}},
            [*FP32, *words("--optimizer lamb --lr 2e-3 --adam-beta2 0.999 --weight-decay 0 --lr-decay-style constant"),
             *words("--lamb-max-coeff 5 --lamb-min-coeff 0.01")],
        ),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"lr": 2e-3, "freeze_step": 3, "cuda_aware": False,
                                                            "comm_backend_name": "nccl"}}},
            [*FP32, *words("--optimizer onebitadam --lr 2e-3 --adam-beta2 0.999 --weight-decay 0"),
             *words("--lr-decay-style constant --onebit-freeze-step 3")],
        ),
        (
            {"optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 3, "coeff_beta": 0.8, "factor_max": 3.0}}},
            [*FP32, *words("--optimizer onebitlamb --lr 1e-3 --adam-beta2 0.999 --weight-decay 0"),
             *words("--lr-decay-style constant --onebit-freeze-step 3 --lamb-min-coeff 0.01 --lamb-max-coeff 10"),
             *words("--onebit-coeff-beta 0.8 --onebit-factor-max 3")],
        ),
        (
            {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.001, "momentum": 0.9,
                                                      "weight_decay": 0.01}}},
            [*FP32, *words("--optimizer muon --lr 1e-3 --muon-extra-scale-factor 20 --muon-scale-mode shape_scaling"),
             *words("--muon-split-qkv none --muon-momentum 0.9 --adam-eps 1e-10 --weight-decay 0.01"),
             *words("--lr-decay-style constant")],
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            [*FP32, *words("--zero-stage 3 --offload-params --offload-optimizer")],
        ),
        (
            {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4},
            [*FP32, *words("--global-batch-size 16")],
        ),
        (
            {"cuda_visible_devices": "0,1", "compile": {"enabled": True, "backend": "inductor", "kwargs": {"a": 1}},
             "aio": {"thread_count": 1, "block_size": 1048576}, "fp32_allreduce": True},
            FP32,
        ),
        (
            {"elasticity": {"enabled": False}, "sparse_gradients": False, "autotuning": {"enabled": False, "x": 1},
             "data_efficiency": {"enabled": False, "anything": {}}, "comet": {"enabled": False}},
            FP32,
        ),
    ],
)  # fmt: skip
def test_a_file_gives_what_the_flags_give(document: Any, ours: list[str], tmp_path: Path) -> None:
    given = [*GOOD, "--num-layers", "4"]
    assert parse(*given, *written(tmp_path, document)) == parse(*given, *ours)


def test_the_launch_says_what_became_of_the_keys(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = {"gradient_clipping": 0.5, "aio": {"queue_depth": 8}, "zero_optimization": {"stage": "auto"}}
    flags = written(tmp_path, document)
    parse(*GOOD, "--deepspeed", *flags, "--clip-grad", "0.5")
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        f'megacore: note: left to the flags by {flags[1]} ("auto"): zero_optimization.stage',
        f"megacore: note: translated from {flags[1]}: gradient_clipping 0.5 is --clip-grad 0.5; neither bf16 nor fp16 "
        "is --precision fp32",
        "megacore: note: Megatron-DeepSpeed's, and without effect here: --deepspeed",
        f"megacore: note: {flags[1]}'s, and without effect here: aio.queue_depth 8",
    ]


# ---- refusals


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            {"zero_optimization": {"stag": 2}},
            "zero_optimization.stag is not a key of DeepSpeed 0.19 (did you mean zero_o",
        ),
        ({"zero_optimization": {"stage": 4}}, "--zero-stage 4 must be at least 0 and at most 3"),
        ({"train_batch_size": "16"}, 'train_batch_size "16" is not a whole number of 1 or more: use 16, without quot'),
        ({"gradient_clipping": "1.0"}, 'gradient_clipping "1.0" is not a number: use 1.0, without quotation marks'),
        ({"bf16": {"enable": True}}, "bf16.enable is not a key of DeepSpeed 0.19 (did you mean bf16.enabled?)"),
        (
            {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3}}},
            "optimizer.params.learning_rate is not a key of DeepSpeed 0.19 (did you mean optimizer.params.lr?)",
        ),
        ({"elasticity": {"enabled": True}}, 'elasticity {"enabled": true}: DeepSpeed 0.19 has removed it'),
        ({"fp16": {"enabled": True, "loss_scale": "dynamic"}}, "use 0, which is the dynamic scale"),
        ({"zero_optimization": {"stage": "two"}}, 'zero_optimization.stage "two" is not a whole number of 0 or more'),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "cpu_offload": True}},
            "needs --zero-stage 3",
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "parameters are kept in host memory, not on di"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "use cpu, or more --dp ranks"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "is not quantised: leave it out"),
        ({"zero_optimization": 3}, "zero_optimization 3 must be an object"),
        ({"zero_optimization": {"mics_shard_size": 4}}, "DeepSpeed 0.19 has removed it"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled true is given as well: keep one"),
        ({"torch_autocast": {"enabled": True}}, "use bf16 or fp16, with fp32 masters"),
        ({"gradient_allreduce_op": "sum"}, "the loss is the mean over the global batch: use mean"),
        ({"optimizer": {"type": "ZeroOneAdam"}}, "ZeroOneAdam is not in megacore as DeepSpeed has it: use AdamW"),
        (
            {"optimizer": {"type": "AdamW", "params": {"max_coeff": 2}}},
            "max_coeff 2 is of Lamb or OneBitLamb: leave it out",
        ),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 2, "factor_max": 2}}},
            "2 is of OneBitLamb: leave",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, "--onebit-freeze-step 100000 must be below --train-iters"),
        ({"optimizer": {"type": "Muon", "params": {"ns_method": "qr"}}}, "both compute the same Newton-Schulz steps"),
        ({"scheduler": {"type": "Exponential"}}, "WarmupCosineLR, OneCycle or LRRangeTest, or --lr-decay-style"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}}, "needs cycle_max_lr: give it"),
        ({"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_staircase": True}}}, "from step to step"),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "AdamW has no maximum of moments"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "needs total_num_steps"),
        ({"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}}, "every sample of the data"),
        ({"hybrid_engine": {"enabled": True}}, "training and generation are separate programs"),
        ({"autotuning": {"enabled": True}}, "use python tools/plan.py pretrain_gpt.py --search"),
        ({"comet": {"enabled": True}}, "use tensorboard, wandb or csv_monitor"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "accumulated and reduced in fp32 or bf16"),
        ({"amp": {"enabled": True}}, "megacore has no such feature: leave it out"),
        ({"gradient_accumulation_steps": 4}, "needs the size of a microbatch"),
        ({"train_batch_size": "16"}, 'train_batch_size "16" is not a whole number of 1 or more'),
        ({"tensorboard": {"enabled": True, "output_path": 3}}, "tensorboard.output_path 3 is not a text"),
        ({"a" * 5000: 1}, f"{'a' * 57}... is not a key of DeepSpeed 0.19: leave it out"),
        ({"": 1}, ': "" is not a key of DeepSpeed 0.19'),
        ({"optimizer": {"type": "Muon", "params": {"lr": "fast"}}}, 'optimizer.params.lr "fast" is not a number'),
        ("{", "is not valid JSON"),
        ('{"fp16": {}, "fp16": {}}', "fp16 is given twice"),
        ("[1]", "must hold an object"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(document: Any, said: str, refuse: Refuse, tmp_path: Path) -> None:
    (problem,) = problems(refuse(*GOOD, *written(tmp_path, document)))
    assert said in problem


def test_all_problems_come_at_once(refuse: Refuse, tmp_path: Path) -> None:
    document = {
        "train_batch_size": 17,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "zero_optimization": {"zero_quantized_weights": True, "stagee": 1},
        "gradient_clipping": 1.0,
    }
    flags = written(tmp_path, document)
    found = problems(refuse(*GOOD, *flags, "--clip-grad", "2", "--tp", "0"))
    assert [problem.removeprefix(f"{flags[1]}: ").split(":")[0][:40] for problem in found] == [
        "zero_optimization.stagee is not a key of",
        "zero_optimization.zero_quantized_weights",
        "gradient_clipping 1 is --clip-grad 1, an",
        "--tp 0 must be at least 1",
    ]


def test_the_three_batch_sizes_must_agree(refuse: Refuse, tmp_path: Path) -> None:
    document = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    (problem,) = problems(refuse(*GOOD, *written(tmp_path, document)))
    assert problem.endswith(
        "train_batch_size 12 must be train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 4 x 1 "
        "data-parallel ranks = 8: use train_batch_size 8, or change one of the others"
    )


def test_a_refused_value_is_found_in_its_file(refuse: Refuse, tmp_path: Path) -> None:
    flags = written(tmp_path, {"zero_optimization": {"stage": 4}, "gradient_clipping": 1.0})
    lines = refuse(*GOOD, *flags).splitlines()
    assert f"Translated: zero_optimization.stage 4 of {flags[1]} is --zero-stage 4." in lines
    assert not any("gradient_clipping" in line for line in lines)


def test_sections_that_nothing_turns_on_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = written(tmp_path, {"fp16": {"loss_scale": 0}, "bf16": {}, "wandb": {"enabled": False, "teem": 1}})
    parse(*GOOD, *flags)
    said = capfd.readouterr().err
    assert f"megacore: note: without effect in {flags[1]}, because nothing turns them on: fp16\n" in said


def test_a_file_that_does_not_exist_is_named(refuse: Refuse, tmp_path: Path) -> None:
    (problem,) = problems(refuse(*GOOD, "--deepspeed_config", str(tmp_path / "none.json")))
    assert problem == f"--deepspeed-config {tmp_path}/none.json cannot be read: No such file or directory: " + (
        "use an existing JSON file"
    )


# ---- flags


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("--ds-sequence-parallel-size 2", "--cp 2 --cp-comm ulysses"),
        ("--ds-sequence-parallel-size 1", ""),
        ("--deepspeed-activation-checkpointing --partition-activations --tp 2",
         "--recompute full --distribute-saved-activations --tp 2"),
        ("--partition-activations --checkpoint-in-cpu", ""),
        ("--checkpoint-in-cpu --deepspeed-activation-checkpointing", "--recompute full --offload-activations"),
        ("--cpu-optimizer --zero-stage 2", "--offload-optimizer --zero-stage 2"),
        ("--cpu-optimizer --zero-stage 3 --remote-device cpu", "--offload-optimizer --zero-stage 3 --offload-params"),
        ("--zero-reduce-bucket-size 500000000 --zero-contigious-gradients", "--bucket-size-mb 1907.35"),
        ("--local_rank=0 --deepspeed --no-pipeline-parallel --remote-device none", ""),
        ("--global-batch-size 8 --seq-length 64 --train-tokens 100000 --lr-decay-tokens 2600 --lr-warmup-tokens 1024",
         "--global-batch-size 8 --seq-length 64 --lr-decay-iters 5 --lr-warmup-iters 2"),
        ("--global-batch-size 8 --seq-length 64 --train-tokens 1025",
         "--global-batch-size 8 --seq-length 64 --train-iters 3 --lr-decay-iters 10"),
        ("--global-batch-size 8 --seq-length 64 --train-tokens 1025 --lr-decay-tokens 2600 --lr-warmup-fraction 0.2",
         "--global-batch-size 8 --seq-length 64 --train-iters 3 --lr-decay-iters 5 --lr-warmup-iters 1"),
        ("--global-batch-size 8 --seq-length 64 --train-tokens 1025 --lr-warmup-fraction 0.2",
         "--global-batch-size 8 --seq-length 64 --train-iters 3 --lr-decay-iters 10 --lr-warmup-iters 2"),
        ("--global-batch-size 8 --seq-length 64 --train-tokens 1024 --lr-decay-style constant",
         "--global-batch-size 8 --seq-length 64 --train-iters 2 --lr-decay-style constant"),
        ("--global-batch-size 8 --seq-length 64 --rampup-batch-size 4 4 8 --train-tokens 1025",
         "--global-batch-size 8 --seq-length 64 --rampup-batch-size 4 4 8 --train-iters 4 --lr-decay-iters 10"),
    ],
)  # fmt: skip
def test_a_flag_of_megatron_deepspeed_is_ours(given: str, ours: str) -> None:
    base = [*GOOD, "--attention-dropout", "0", "--num-attention-heads", "4"]
    assert parse(*base, *given.split()) == parse(*base, *ours.split())


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--no-pipeline-parallel --pp 2", "--no-pipeline-parallel contradicts --pp 2"),
        ("--remote-device nvme", "in host memory: use none or cpu"),
        ("--ds-sequence-parallel-size 0", "'0' is not a whole number of 1 or more"),
        ("--zero-reduce-bucket-size x", "'x' is not a number of elements"),
        ("--lr-decay-tokens 1024", "counts tokens: give --global-batch-size too"),
    ],
)
def test_flags_without_counterpart_are_refused(given: str, said: str, refuse: Refuse) -> None:
    (problem,) = problems(refuse(*GOOD, *given.split()))
    assert said in problem


def test_tokens_alone_say_when_the_run_ends() -> None:
    given = ["--mock-data", "--vocab-size", "64", "--global-batch-size", "8", "--seq-length", "64"]
    assert parse(*given, "--train-tokens", "1025") == parse(*given, "--train-iters", "3")


# ---- configurations as people have them


REAL: dict[str, tuple[dict[str, Any], str]] = {
    "BLOOM's": (
        {
            "train_micro_batch_size_per_gpu": 2,
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 0},
            "bf16": {"enabled": True},
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        "--micro-batch-size 2 --global-batch-size 8 --precision bf16 --log-interval 2000",
    ),
    "the Trainer's for ZeRO-3 with offload of parameters and optimizer": (
        {
            "fp16": {
                "enabled": "auto",
                "loss_scale": 0,
                "loss_scale_window": 1000,
                "initial_scale_power": 16,
                "hysteresis": 2,
                "min_loss_scale": 1,
            },
            "bf16": {"enabled": "auto"},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
            },
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
                "stage3_max_reuse_distance": 1e9,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "wall_clock_breakdown": False,
        },
        "--precision fp16 --initial-loss-scale 262144 --lr 1e-3 --adam-beta2 0.999 --weight-decay 0 --zero-stage 3 "
        "--lr-decay-style constant --offload-optimizer --offload-params --log-interval 2000",
    ),
    "an image classifier's": (
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 8},
            },
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "bf16": {"enabled": False},
            "fp16": {"enabled": False, "fp16_master_weights_and_grads": False, "loss_scale": 0},
            "wall_clock_breakdown": False,
            "zero_optimization": {
                "stage": 2,
                "allgather_partitions": True,
                "reduce_scatter": True,
                "allgather_bucket_size": 50000000,
                "reduce_bucket_size": 50000000,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "cpu_offload": False,
            },
        },
        "--global-batch-size 16 --micro-batch-size 4 --precision fp32 --lr 1e-3 --adam-beta1 0.8 --adam-beta2 0.999 "
        "--weight-decay 3e-7 --lr-decay-style constant --lr-warmup-iters 8 --lr-warmup-style log --zero-stage 2 "
        "--bucket-size-mb 190.735 --log-interval 2000",
    ),
    "Megatron-DeepSpeed's for GPT": (
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 10,
            "zero_optimization": {"stage": 1, "elastic_checkpoint": True},
            "gradient_clipping": 1.0,
            "prescale_gradients": True,
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "loss_scale_window": 500,
                "hysteresis": 2,
                "min_loss_scale": 1,
                "initial_scale_power": 11,
            },
            "wall_clock_breakdown": False,
        },
        "--global-batch-size 16 --micro-batch-size 2 --zero-stage 1 --precision fp16 --loss-scale-window 500 "
        "--initial-loss-scale 8192",
    ),
}


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("name", REAL)
def test_a_real_configuration_runs_as_it_is(name: str, tmp_path: Path) -> None:
    document, ours = REAL[name]
    flags = ["--precision", "fp16"] if "Trainer" in name else []
    assert parse(*GOOD, *flags, *written(tmp_path, document)) == parse(*GOOD, *words(ours))


@pytest.mark.usefixtures("four_ranks")
def test_a_format_that_is_left_to_the_flags_takes_its_settings_along(tmp_path: Path) -> None:
    flags = written(tmp_path, {"fp16": {"enabled": "auto", "hysteresis": 3, "initial_scale_power": 4}})
    scale = words("--hysteresis 3 --initial-loss-scale 64")
    assert parse(*GOOD, "--precision", "fp16", *flags) == parse(*GOOD, "--precision", "fp16", *scale)
    assert parse(*GOOD, "--precision", "bf16", *flags) == parse(*GOOD, "--precision", "bf16")


@pytest.mark.parametrize("scale", [{"loss_scale": 0}, {}])
def test_the_file_decides_about_the_loss_scale(
    scale: dict[str, int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [*GOOD, "--fp16", *written(tmp_path, {"fp16": {"enabled": True, "initial_scale_power": 12, **scale}})]
    assert parse(*flags, "--loss-scale", "12") == parse(*flags)
    assert "dynamic (fp16.loss_scale 0), and --loss-scale 12 has no effect beside it" in capfd.readouterr().err


# ---- schedules that are DeepSpeed's step by step


def test_one_cycle_is_deepspeeds_in_every_step(tmp_path: Path) -> None:
    """From its least rate at the first step, along lines, and then constant; its momentum the other way."""
    params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 2e-3, "cycle_first_step_size": 3, "cycle_second_step_size": 4}
    document: Any = {
        "optimizer": {"type": "Adam", "params": {"lr": 7.0, "betas": [0.5, 0.6]}},
        "scheduler": {"type": "OneCycle", "params": params | {"cycle_min_mom": 0.7, "cycle_max_mom": 0.95}},
    }
    config = parse(*GOOD, *written(tmp_path, document))
    found = [learning_rate(step, config.optimizer, train_iters=10) for step in range(1, 11)]
    expected = np.interp(range(10), [0, 3, 7], [1e-4, 2e-3, 1e-4]).tolist()
    assert found == pytest.approx(expected, rel=1e-12)
    momenta = [momentum(step, config.optimizer, usual=0.95, train_iters=10) for step in range(1, 11)]
    assert momenta == pytest.approx(np.interp(range(10), [0, 3, 7], [0.95, 0.7, 0.95]).tolist(), rel=1e-12)
    assert (config.adamw.adam_beta1, config.adamw.adam_beta2) == (0.95, 0.99)  # as DeepSpeed's OneCycle sets them
    document["scheduler"]["params"]["cycle_momentum"] = False
    config = parse(*GOOD, *written(tmp_path, document))
    assert {momentum(step, config.optimizer, usual=0.5, train_iters=10) for step in range(1, 11)} == {0.5}
    assert (config.adamw.adam_beta1, config.adamw.adam_beta2) == (0.5, 0.6)


def test_the_range_test_is_deepspeeds_in_every_step(tmp_path: Path) -> None:
    params = {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    config = parse(*GOOD, *written(tmp_path, {"scheduler": {"type": "LRRangeTest", "params": params}}))
    found = [learning_rate(step, config.optimizer, train_iters=10) for step in range(1, 11)]
    assert found == pytest.approx([1e-3 * (1 + 2.0 * step / 4) for step in range(10)], rel=1e-12)
    assert {momentum(step, config.optimizer, usual=0.9, train_iters=10) for step in range(1, 11)} == {0.9}


# ---- the logarithmic warm-up


def test_the_logarithmic_warm_up_is_that_of_warmup_lr() -> None:
    config = OptimizerConfig(lr=2e-3, lr_warmup_iters=7, lr_warmup_style="log", lr_decay_style="constant")
    rates = [learning_rate(step, config, train_iters=20) for step in range(1, 10)]
    expected = [2e-3 * math.log(step) / math.log(7) if step < 7 else 2e-3 for step in range(1, 10)]
    assert rates == pytest.approx(expected, rel=1e-12)
