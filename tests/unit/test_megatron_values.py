"""Megatron-LM's flags that say the same in another form: the configuration they give, and what each refusal names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacore.checkpoint.manifest import find_checkpoint
from megacore.config.model import padded_rows
from megacore.errors import CheckpointError
from tests.unit import refusals
from tests.unit.refusals import GOOD, Refuse, parse, problems

alone, refuse = refusals.alone, refusals.refuse  # fixtures
PP = (*GOOD, "--pp", "4", "--num-layers", "24")


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["--num-virtual-stages-per-pipeline-rank", "3"], ["--virtual-stages", "3", "--schedule", "interleaved"]),
        (["--num-virtual-stages-per-pipeline-rank", "1"], []),
        (["--num-layers-per-virtual-pipeline-stage", "2"], ["--virtual-stages", "3", "--schedule", "interleaved"]),
        (["--num-layers-per-virtual-pipeline-stage", "6"], []),
        (["--pipeline-model-parallel-layout", "Et*5|(t*6|)*2t*7,L"], ["--pipeline-layout", "E,5*t|6*t|6*t|7*t,H"]),
        (
            ["--pipeline-model-parallel-layout", "Ettt|(ttt|)*6tttL"],
            [
                "--pipeline-layout",
                "E,3*t|" + "3*t|" * 6 + "3*t,H",
                "--virtual-stages",
                "2",
                "--schedule",
                "interleaved",
            ],
        ),
        (["--use-flash-attn"], ["--attention", "sdpa"]),
        (["--attention-backend", "flash"], ["--attention", "sdpa"]),
        (["--attention-backend", "unfused"], ["--attention", "fused-softmax"]),
        (["--attention-backend", "auto"], []),
        (["--use-flash-attn", "--attention-backend=fused"], ["--attention", "sdpa"]),
        (["--window-size", "128,0"], ["--window-size", "129"]),
        (["--window-size", "(15, 0)"], ["--window-size", "16"]),
        (["--window-size=0,0"], ["--window-size", "1"]),
        (
            ["--window-size", "128,0", "--window-attn-skip-freq", "4"],
            ["--window-size", "129", "--attention-pattern", "3*w,f"],
        ),
        (
            ["--window-size", "7,0", "--window-attn-skip-freq", "[1,1,0]*7 + [1]*2+[0]"],
            ["--window-size", "8", "--attention-pattern", "2*w,f"],
        ),
        (["--softmax-type", "vanilla", "--rerun-mode", "validate_results", "--spec", "local"], []),
        (
            ["--megatron-fsdp-main-params-dtype", "fp32", "--megatron-fsdp-grad-comm-dtype", "bf16"],
            ["--grad-reduce-dtype", "bf16"],
        ),
    ],
)
def test_a_translated_flag_is_ours(given: list[str], ours: list[str]) -> None:
    assert parse(*PP, *given) == parse(*PP, *ours)


def test_a_translated_flag_goes_with_lists_and_unset_values(refuse: Refuse, capfd: pytest.CaptureFixture[str]) -> None:
    assert parse(*GOOD, "--use-flash-attn", "--dp", "None") == parse(*GOOD, "--attention", "sdpa")
    assert "note: translated from Megatron-LM: --use-flash-attn is --attention sdpa" in capfd.readouterr().err
    found = problems(
        refuse("--use-flash-attn", "--data-path", "1", "a", "2", "b", "--vocab-size", "8", "--train-iters", "7")
    )
    assert [problem.split(":")[0] for problem in found] == ["--data-path a", "--data-path b"]


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--num-layers-per-virtual-pipeline-stage", "4"], "must divide the 6 layers per rank"),
        (["--num-layers-per-virtual-pipeline-stage", "0"], "'0' is not a whole number of 1 or more"),
        (["--num-virtual-stages-per-pipeline-rank"], "needs one value, and has 0"),
        (["--pipeline-model-parallel-layout", "Ettt|tm|L"], "multi-token prediction (m) is not in megacore"),
        (["--pipeline-model-parallel-layout", "Et*24||L"], "has an empty stage"),
        (["--pipeline-model-parallel-layout", "Et*12|t*12L"], "has 2 stages, which --pp 4 must divide"),
        (["--pipeline-model-parallel-layout", "E(t*999999|)*999999L"], "more than 100,000 layers"),
        (["--attention-backend", "falsh"], "use auto, flash, fused, unfused or local (did you mean flash?)"),
        (["--use-flash-attn", "yes"], "a switch takes no value"),
        (["--use-flash-attn", "--attention", "fused-softmax"], "--attention fused-softmax is given as well: keep one"),
        (["--use-flash-attn", "--attention-backend", "local"], "--use-flash-attn is given as well: keep one of them"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(given: list[str], said: str, refuse: Refuse) -> None:
    (problem,) = problems(refuse(*PP, *given))
    assert said in problem
    assert any(word in problem for word in given if word.startswith("--"))


def test_a_layout_without_a_pipeline_names_the_flag_that_was_given(refuse: Refuse) -> None:
    (problem,) = problems(refuse(*GOOD, "--pipeline-model-parallel-layout", "Et|tL"))
    assert problem == (
        "--pipeline-model-parallel-layout Et|tL has 2 stages, and without a pipeline there is one: use --pp 2, or "
        "leave --pipeline-model-parallel-layout out"
    )


@pytest.mark.usefixtures("four_ranks")
def test_layers_of_unequal_stages_have_another_way(refuse: Refuse) -> None:
    (problem,) = problems(
        refuse(*GOOD, "--pp", "4", "--num-layers", "23", "--num-layers-per-virtual-pipeline-stage", "2")
    )
    assert "--pp 4 does not divide --num-layers 23" in problem
    assert "--virtual-stages" in problem


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (["--bf16"], ["--precision", "bf16"]),
        (["--fp16"], ["--precision", "fp16"]),
        (["--grad-reduce-in-bf16"], ["--grad-reduce-dtype", "bf16"]),
        (["--use-distributed-optimizer"], ["--zero-stage", "1"]),
        (["--optimizer-cpu-offload"], ["--offload-optimizer"]),
        (["--deterministic-mode"], ["--deterministic"]),
        (["--use-checkpoint-opt_param-scheduler"], ["--same-schedule"]),
        (["--test-mode", "--lr-warmup-samples", "0", "--global-batch-size", "4"], ["--global-batch-size", "4"]),
        (["--checkpoint-activations"], ["--recompute", "full"]),
        (["--recompute-activations"], ["--recompute", "selective"]),
        (
            ["--activations-checkpoint-method", "uniform", "--activations-checkpoint-num-layers", "1"],
            ["--recompute", "full"],
        ),
        (
            ["--activations-checkpoint-method", "block", "--activations-checkpoint-num-layers", "1"],
            ["--recompute", "full", "--recompute-num-layers", "1"],
        ),
        (["--activations-checkpoint-num-layers", "1"], []),
        (
            ["--activations-checkpoint-method", "uniform", "--activations-checkpoint-granularity", "selective"],
            ["--recompute", "selective"],
        ),
        (["--mtp-num-layers", "0", "--glu-linear-offset", "0.0", "--head-lr-mult", "1.0", "--fp8-margin", "0"], []),
        (
            ["--use-precision-aware-optimizer", "--exp-avg-dtype", "fp32", "--main-grads-dtype", "fp32"],
            [],
        ),
        (
            ["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"],
            ["--moments-dtype", "bf16"],
        ),
        (["--use-precision-aware-optimizer", "--main-grads-dtype", "bf16"], ["--grad-reduce-dtype", "bf16"]),
        (["--num-experts", "1", "--moe-loss-coeff", "0.01", "--moe-min-capacity", "4"], []),
        (["--num-experts", "1", "--topk", "1", "--mlp-type", "standard", "--disable-moe-token-dropping"], []),
        (["--fp8-interval", "1", "--fp8-amax-history-len", "1024", "--fp8-recipe", "delayed", "--no-fp8-wgrad"], []),
        (["--num-distributed-optimizer-instances", "1", "--hybrid-mlp-ratio", "0.0", "--vocab-extra-ids", "0"], []),
        (["--mtp-num-layers", "0", "--mtp-loss-scaling-factor", "0.1", "--qk-clip-alpha", "0.5"], []),
        (
            ["--lr-warmup-fraction", "0.29", "--lr-decay-iters", "100"],
            ["--lr-warmup-iters", "29", "--lr-decay-iters", "100"],
        ),
        (["--warmup", ".01", "--lr-decay-iters", "100"], ["--lr-warmup-iters", "1", "--lr-decay-iters", "100"]),
        (["--lr-warmup-fraction", "0.25"], ["--lr-warmup-iters", "3"]),
        (
            ["--lr-warmup-samples", "10", "--global-batch-size", "4"],
            ["--lr-warmup-iters", "3", "--global-batch-size", "4"],
        ),
        (
            ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
            ["--recompute", "full"],
        ),
        (
            ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1"],
            ["--recompute", "full", "--recompute-num-layers", "1"],
        ),
        (
            ["--swiglu", "--hidden-size", "768"],
            ["--activation", "swiglu", "--hidden-size", "768", "--ffn-hidden-size", "2048"],
        ),
        (["--swiglu", "--ffn-hidden-size", "96"], ["--activation", "swiglu", "--ffn-hidden-size", "96"]),
        (
            ["--swiglu", "--no-bias-gelu-fusion", "--ffn-hidden-size", "96"],
            ["--activation", "swiglu", "--ffn-hidden-size", "96"],
        ),
        (["--no-bias-gelu-fusion"], ["--activation", "gelu-exact"]),
        (["--openai-gelu"], ["--activation", "gelu"]),
        (["--squared-relu"], ["--activation", "relu2"]),
        (["--group-query-attention", "--num-query-groups", "2"], ["--num-query-groups", "2"]),
        (["--group-query-attention"], ["--num-query-groups", "1"]),
        (["--use-rotary-position-embeddings"], ["--position-embedding-type", "rope"]),
        (
            ["--position-embedding-type", "rope", "--use-rope-scaling"],
            ["--position-embedding-type", "rope", "--rope-scaling", "llama3", "--rope-original-max-positions", "8192"],
        ),
        (
            ["--position-embedding-type", "rope", "--rotary-seq-len-interpolation-factor", "4"],
            ["--position-embedding-type", "rope", "--rope-scaling", "linear", "--rope-scaling-factor", "4"],
        ),
        (
            ["--lr-warmup-fraction", "0.1", "--lr-decay-samples", "400", "--global-batch-size", "4"],
            ["--lr-warmup-iters", "10", "--lr-decay-iters", "100", "--global-batch-size", "4"],
        ),
        (
            ["--lr-warmup-samples", "39", "--lr-decay-samples", "401", "--global-batch-size", "4"],
            ["--lr-warmup-iters", "10", "--lr-decay-iters", "100", "--global-batch-size", "4"],
        ),
        (["--preset", "llama-3.2-1b", "--swiglu", "--no-bias-gelu-fusion"], ["--preset", "llama-3.2-1b"]),
    ],
    ids=str,
)
def test_a_flag_in_other_words_is_the_flag(given: list[str], ours: list[str]) -> None:
    assert parse(*GOOD, *given) == parse(*GOOD, *ours)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--rotary-base", "500000"], "--rotary-base 500000 (with --position-embedding-type learned)"),
        (["--kv-lora-rank", "64"], "--kv-lora-rank 64 (without --multi-latent-attention)"),
        (["--lr-warmup-init", "1e-7"], "--lr-warmup-init 1e-07 (without a warm-up)"),
        (["--num-experts", "1", "--moe-z-loss-coeff", "0.1"], "--moe-z-loss-coeff 0.1 (a model without experts)"),
        (
            ["--num-experts", "1", "--moe-aux-loss-coeff", "0.1", "--moe-router-load-balancing-type", "aux_loss"],
            "--moe-aux-loss-coeff 0.1 (a model without experts)",
        ),
    ],
    ids=str,
)
def test_what_megatron_does_not_read_is_left_out_beside_its_names(
    given: list[str], said: str, refuse: Refuse, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--micro-batch-size", "2", "--global-batch-size", "2"]
    theirs = [*GOOD, *sizes, "--tensor-model-parallel-size", "1"]
    assert parse(*theirs, *given) == parse(*theirs)
    assert said in capfd.readouterr().err
    assert problems(refuse(*GOOD, *sizes, *given))


def test_what_megatron_reads_stays() -> None:
    theirs = [*GOOD, "--tensor-model-parallel-size", "1"]
    assert parse(*theirs, "--use-rotary-position-embeddings", "--rotary-base", "500000").model.rotary_base == 500_000
    warmup = ["--lr-warmup-init", "1e-7", "--lr-warmup-fraction", "0.5"]
    assert parse(*theirs, *warmup).optimizer.lr_warmup_init == 1e-7


def test_finetune_goes_with_flags_of_what_it_does_not_load(tmp_path: Path) -> None:
    flags = ["--load", str(tmp_path), "--finetune", "--no-load-optim", "--no-load-rng"]
    assert parse(*GOOD, *flags) == parse(*GOOD, "--pretrained-checkpoint", str(tmp_path))


def test_a_checkpoint_of_megatron_is_told_from_none(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    for given in (tmp_path, tmp_path / "iter_0000010"):
        with pytest.raises(CheckpointError, match=f"--from megatron --to megacore --input {given} --output DIR"):
            find_checkpoint(given)


def test_a_run_may_be_as_long_as_samples_say() -> None:
    start = (*GOOD[:3], "--global-batch-size", "4")
    expected = parse(*start, "--train-iters", "200", "--lr-warmup-iters", "20")
    assert parse(*start, "--lr-warmup-fraction", "0.1", "--train-samples", "803") == expected


def test_a_split_may_be_quoted_as_megatrons_scripts_do() -> None:
    assert (
        parse(*GOOD, "--split", "'99,1,0'").data.split_shares() == parse(*GOOD, "--split", "99,1").data.split_shares()
    )


def test_each_split_has_its_data_in_a_file(tmp_path: Path, refuse: Refuse, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "v"):
        for suffix in (".bin", ".idx"):
            (tmp_path / f"{name}{suffix}").touch()
    a, b, v = (str(tmp_path / name) for name in ("a", "b", "v"))
    file = tmp_path / "splits.json"
    file.write_text(json.dumps({"train": ["0.3", a, 0.7, b], "valid": [v], "test": None}))
    start = ("--vocab-size", "64", "--train-iters", "10")
    expected = parse(*start, "--train-data-path", "0.3", a, "0.7", b, "--valid-data-path", v)
    assert parse(*start, "--per-split-data-args-path", str(file)) == expected
    assert "--per-split-data-args-path" in capfd.readouterr().err
    for text, said in (
        ("{", "is not valid JSON (Expecting"),
        ("[1]", "has no training data: use a JSON file such as"),
        ('{"train": "a"}', "train must be a list of prefixes"),
        ('{"train": ["a"], "validation": ["b"]}', "has the split 'validation': use train, valid or test"),
    ):
        file.write_text(text)
        assert any(said in problem for problem in problems(refuse(*start, "--per-split-data-args-path", str(file))))


def test_several_validation_sets_have_numbers(tmp_path: Path, refuse: Refuse) -> None:
    for name in ("a", "b", "v"):
        for suffix in (".bin", ".idx"):
            (tmp_path / f"{name}{suffix}").touch()
    a, b, v = (str(tmp_path / name) for name in ("a", "b", "v"))
    start = ("--vocab-size", "64", "--train-iters", "10", "--train-data-path", a)
    expected = parse(*start, "--valid-sets", f"0={b}", f"1={v}")
    assert parse(*start, "--valid-data-path", b, v, "--multiple-validation-sets") == expected
    file = tmp_path / "splits.json"
    file.write_text(json.dumps({"train": [a], "valid": [b, v]}))
    flags = ("--per-split-data-args-path", str(file), "--multiple-validation-sets")
    assert parse(*start[:4], *flags) == expected
    said = refuse(*start, "--valid-data-path", "0.4", b, "0.6", v, "--multiple-validation-sets")
    assert "takes no weights, and --valid-data-path has 0.4 0.6: leave the weights out" in said


def test_fusions_of_swiglu_and_of_the_loss_change_nothing() -> None:
    fusions = ["--no-bias-swiglu-fusion", "--cross-entropy-fusion-impl", "te"]
    assert parse(*GOOD, "--swiglu", *fusions) == parse(*GOOD, "--swiglu")


def test_flags_without_effect_are_accepted_and_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    idle = ["--use-mcore-models", "--transformer-impl", "local", "--ckpt-format", "torch_dist", "--no-rope-fusion"]
    assert parse(*GOOD, *idle) == parse(*GOOD)
    said = capfd.readouterr().err
    assert said == (
        "megacore: note: Megatron-LM's, and without effect here: --use-mcore-models, --transformer-impl local, "
        "--ckpt-format torch_dist, --no-rope-fusion\n"
    )


def test_a_script_loads_from_where_it_saves(tmp_path: Path, refuse: Refuse, capfd: pytest.CaptureFixture[str]) -> None:
    fresh = str(tmp_path / "fresh")
    assert parse(*GOOD, "--save", fresh, "--load", fresh + "/").checkpoint.load == "auto"
    assert "from the beginning if there is none (--load auto)" in capfd.readouterr().err
    (problem,) = problems(refuse(*GOOD, "--save", fresh, "--load", fresh, "--exit-on-missing-checkpoint"))
    assert "is not a directory" in problem
    (problem,) = problems(refuse(*GOOD, "--output-dir", fresh, "--load", fresh))
    assert "is not a directory" in problem


@pytest.mark.parametrize(("size", "tp"), [(128, 2), (127, 2), (1000, 1)])
def test_a_null_tokenizer_has_one_token_more(size: int, tp: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The token that ends a document is the last one, and padding comes after it, as Megatron-LM counts."""
    given = ["--mock-data", "--train-iters", "10", "--vocab-size", str(size), "--tokenizer-type", "NullTokenizer"]
    model = parse(*given).model
    padded = size + 1
    while padded % (128 * tp):
        padded += 1
    assert model.vocab_size == size + 1
    assert tp * padded_rows(model.vocab_size, tp, model.make_vocab_size_divisible_by) == padded
    said = capfd.readouterr().err
    assert f"adds a token that ends a document, {size}, to --vocab-size {size}: --vocab-size {size + 1} here" in said
    assert "without effect" not in said
    assert parse(*given, "--null-tokenizer-eod-id", "5").model.vocab_size == size
    assert parse(*given[:-1], "GPT2BPETokenizer").model.vocab_size == size


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--train-samples", "10"], "counts samples: give --global-batch-size, or steps with --train-iters"),
        (["--lr-warmup-fraction", "1.5"], "is not a number of at least 0 and below 1"),
        (["--recompute-granularity", "some"], "use selective or full"),
        (["--activations-checkpoint-method", "some"], "use uniform or block"),
        (["--mtp-num-layers", "1"], "--mtp-num-layers 1 has no counterpart: megacore has no multi-token prediction"),
        (["--exp-avg-dtype", "bf16"], "beside --exp-avg-sq-dtype fp32: both moments have one format here"),
        (["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "fp16"], "--exp-avg-sq-dtype fp16 has no counterpart"),
        (
            ["--position-embedding-type", "mrope"],
            "mrope is a Megatron-LM value that megacore does not support: positions of images",
        ),
        (["--bert-no-binary-head"], "use --sentence-task none and --num-token-types 1, whose one row"),
        (["--main-grads-dtype", "fp16"], "--main-grads-dtype fp16 has no counterpart"),
        (["--main-params-dtype", "fp16"], "master weights are fp32"),
        (["--num-experts", "4", "--disable-moe-token-dropping"], "--disable-moe-token-dropping: Megatron-DeepSpeed's"),
        (["--num-distributed-optimizer-instances", "2"], "use --zero-shard-size"),
        (["--dataloader-type", "cyclic"], "in another order than --sample-order has"),
        (["--bf16", "--fp16"], "--fp16 is --precision fp16, and --bf16 is given as well"),
        (["--bf16", "True"], "a switch takes no value"),
        (["--window-size", "128,64"], "RIGHT must be 0: use --window-size 128,0, or --window-size 129"),
        (["--window-size", "1,2,3"], "is neither a whole number nor Megatron-LM's LEFT,RIGHT: use, for example"),
        (["--window-attn-skip-freq", "[1,1,0]"], "is for 3 blocks, and --num-layers is"),
        (["--window-attn-skip-freq", "[2]*4"], "is neither a whole number nor a list such as [1,1,1,0]*6"),
        (["--softmax-type", "learnable"], "has no offset here, so that the model would be another one"),
        (["--no-rope-freq", "0"], "use a whole number of 1 or more, or a list such as [1,1,1,0]*6"),
        (["--ckpt-format"], "needs one value, and has 0: leave it out, as it changes nothing here"),
        (
            ["--data-args-path", "/dev/zero"],
            "--data-args-path /dev/zero is not a regular file: use a text file",
        ),
        (["--per-split-data-args-path", "/dev"], "--per-split-data-args-path /dev is a directory: use a JSON file"),
    ],
    ids=str,
)
def test_a_value_without_a_counterpart_is_refused(given: list[str], said: str, refuse: Refuse) -> None:
    assert any(said in problem for problem in problems(refuse(*GOOD, *given)))


LLAMA_3 = """
--use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8
--group-query-attention --num-query-groups 2 --kv-channels 8 --seq-length 32 --max-position-embeddings 32
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout
0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 8
--train-samples 805 --lr-decay-samples 800 --lr-warmup-samples 21 --lr 0.00015 --min-lr 0.00001 --decoupled-lr
5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
--clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--tensor-model-parallel-size 1 --context-parallel-size 2 --pipeline-model-parallel-size 2
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data --tokenizer-type NullTokenizer
--vocab-size 128 --tiktoken-pattern v2 --split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files
--num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
--profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save OUTPUT
--load OUTPUT --tensorboard-dir OUTPUT/tb
"""


@pytest.mark.usefixtures("four_ranks")
def test_the_flags_of_a_whole_script_are_accepted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Those of Megatron-LM's example for Llama 3, with smaller sizes."""
    config = parse(*LLAMA_3.replace("OUTPUT", str(tmp_path)).split())
    assert (config.parallel.cp, config.parallel.pp, config.parallel.dp, config.parallel.zero_stage) == (2, 2, 1, 1)
    assert (config.model.activation, config.model.inner_size, config.model.query_groups) == ("swiglu", 128, 2)
    assert config.model.vocab_size == 129  # the NullTokenizer's last token ends a document
    assert (config.training.train_iters, config.lr_decay_iters, config.optimizer.lr_warmup_iters) == (100, 100, 3)
    assert (config.precision.precision, config.precision.grad_reduce_dtype) == ("bf16", "bf16")
    assert config.checkpoint.load == "auto"
    assert (config.optimizer.decoupled_lr, config.optimizer.decoupled_min_lr) == (5.0e-4, 4.5e-5)
    assert config.data.split_shares() == (0.99, 0.01, 0.0)
    said = capfd.readouterr().err
    assert "--train-samples 805 is --train-iters 100; " in said
    assert "and without effect here: --use-mcore-models, --apply-layernorm-1p, " in said
