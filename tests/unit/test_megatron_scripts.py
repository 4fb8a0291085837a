"""Command lines of Megatron-LM as a whole: its defaults, values that it ignores beside others, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megacore.config.bert import BertConfig
from megacore.config.cli import parse_config
from tests.unit import refusals
from tests.unit.refusals import Refuse, parse, problems

alone, refuse = refusals.alone, refusals.refuse  # fixtures


def words(text: str) -> list[str]:
    """The words of a command line."""
    return text.split()


# What Megatron-LM does not start without, and one of its names.
SCRIPT = words(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 100 --mock-data --vocab-size 128 --tensor-model-parallel-size 1"
)
LATENT = words(
    "--position-embedding-type rope --multi-latent-attention --disable-bias-linear --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8"
)
EXPERTS = words("--num-experts 8 --disable-bias-linear")


@pytest.mark.parametrize(
    ("given", "section", "name", "value"),
    [
        ("", "optimizer", "lr_decay_style", "linear"),
        ("--lr-decay-style cosine", "optimizer", "lr_decay_style", "cosine"),
        ("", "data", "split", "969,30,1"),
        ("", "model", "activation", "gelu"),
        ("--disable-bias-linear", "model", "activation", "gelu-exact"),
        ("--disable-bias-linear --swiglu", "model", "activation", "swiglu"),
        ("--disable-bias-linear --squared-relu", "model", "activation", "relu2"),
        ("--fp16", "precision", "initial_loss_scale", 2.0**32),
        ("--fp16 --loss-scale 128", "precision", "initial_loss_scale", None),
        ("--bf16 --loss-scale 12 --hysteresis 3", "precision", "loss_scale", None),
        ("--optimizer lion", "lion", "lion_beta1", 0.95),
        ("--optimizer dist_muon", "muon", "muon_momentum", 0.9),
        ("--num-experts 1", "experts", "num_experts", None),
        ("--num-attention-heads 8 --num-query-groups 8", "model", "num_query_groups", 8),
        ("--no-position-embedding", "model", "position_embedding_type", "none"),
        ("--no-position-embedding --use-rotary-position-embeddings", "model", "position_embedding_type", "rope"),
        ("--normalization rmsnorm --num-key-value-heads 2", "model", "num_query_groups", 2),
        ("--cp-comm-type p2p a2a", "parallel", "cp_comm", "auto"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "parallel", "zero_stage", 3),
        ("--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads", "parallel", "zero_stage", 2),
        ("--ddp-bucket-size 40000000", "parallel", "bucket_size_mb", 152.588),
        ("--save-retain-interval 50 --save-interval 10", "checkpoint", "keep_every", 50),
        (
            "--recompute-granularity selective --recompute-modules core_attn moe_act",
            "training",
            "recompute",
            "selective",
        ),
        ("--recompute-granularity selective --recompute-modules [core_attn mlp]", "training", "recompute", "full"),
        ("--position-embedding-type rope --no-rope-freq 4", "model", "attention_kinds", "fffn"),
        ("--position-embedding-type rope --no-rope-freq ([1]+[0])*2", "model", "attention_kinds", "nfnf"),
        ("--eval-only True", "training", "skip_train", True),
        ("--expert-tensor-parallel-size 1", "parallel", "etp", None),
        ("--lr-warmup-samples 0 --lr-warmup-fraction 0.1 --global-batch-size 1", "optimizer", "lr_warmup_iters", 10),
    ],
)
def test_a_script_has_the_meaning_that_it_has_there(given: str, section: str, name: str, value: Any) -> None:
    assert getattr(getattr(parse(*SCRIPT, *words(given)), section), name) == value


def test_blocks_with_experts_may_be_a_list() -> None:
    experts = parse(*SCRIPT, *EXPERTS, "--moe-layer-freq", "([0]*2+[1]*2)").experts
    assert [experts.holds(block) for block in range(4)] == [False, False, True, True]
    experts = parse(*SCRIPT, *EXPERTS, "--moe-layer-freq", "[0]+[1,0]+[1]").experts
    assert [experts.holds(block) for block in range(4)] == [False, True, False, True]
    assert parse(*SCRIPT, *EXPERTS, "--moe-layer-freq", "2").experts.holds(2)


def test_latent_attention_is_scaled_by_yarn() -> None:
    """Megatron-LM's yarn multiplies by m(--mscale) / m(--mscale-all-dim), and scores by m(--mscale-all-dim)^2."""
    start = (*SCRIPT, *LATENT)
    assert parse(*start).model.kv_lora_rank == 32
    assert parse(*start).model.rope_scaling == "none"
    assert parse(*start, "--kv-channels", "8", "--mscale", "1", "--mscale-all-dim", "0") == parse(*start)
    assert parse(*start, "--rotary-scaling-factor", "1", "--mscale", "1", "--mscale-all-dim", "1") == parse(*start)
    yarn = ("--rope-scaling", "yarn", "--rope-scaling-factor", "40", "--rope-original-max-positions")
    factor = ("--rotary-scaling-factor", "40")
    assert parse(*start, *factor) == parse(*start, *yarn, "4096")
    assert parse(*start, *factor, "--mscale", "1") == parse(*start, *yarn, "4096")
    both = ("--mscale", "0.7", "--mscale-all-dim", "0.7")
    assert parse(*start, *factor, *both) == parse(*start, *yarn, "4096", *both)
    longer = ("--original-max-position-embeddings", "8192", "--rope-type", "yarn")
    assert parse(*start, *factor, *longer) == parse(*start, *yarn, "8192")


def test_a_script_for_bert_has_the_activation_of_megatron() -> None:
    """Its fused GELU, and its epsilon; --bert-style has those of its paper."""

    def model(*argv: str) -> Any:
        return parse_config(argv, prog="pretrain_bert.py", description="Pretrain a BERT.", kind=BertConfig).model

    assert (model(*SCRIPT).activation, model(*SCRIPT).norm_epsilon) == ("gelu", 1e-5)
    classic = model(*SCRIPT, "--bert-style", "classic")
    assert (classic.activation, classic.norm_epsilon) == ("gelu-exact", 1e-12)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--num-query-groups 2", "has no effect in Megatron-LM without --group-query-attention: add that for 2"),
        (
            "--num-experts 8 --disable-bias-linear --moe-aux-loss-coeff 0.01 --micro-batch-size 2",
            "balances experts within each microbatch in Megatron-LM",
        ),
        (
            "--num-experts 8 --disable-bias-linear --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
            "--micro-batch-size 2",
            "use --micro-batch-size 1, or --moe-router-load-balancing-type seq_aux_loss or global_aux_loss",
        ),
        (
            "--num-experts 8 --disable-bias-linear --moe-router-load-balancing-type sinkhorn",
            "balances experts otherwise, so that training differs",
        ),
        ("--glu-activation reglu", "use geglu or swiglu, or --activation"),
        ("--cp-comm-type p2p mail", "--cp-comm-type p2p mail has no counterpart"),
        ("--recompute-modules gdn", "--recompute-modules gdn has no counterpart: use --recompute selective, or full"),
        ("--recompute full --recompute-activations", "is --recompute selective, and --recompute full is given as well"),
        ("--muon-tp-mode rowwise", "matrices are orthogonalized as a whole"),
        ("--rope-type yarn", "--rope-type yarn needs its factor: use --rotary-scaling-factor"),
        ("--rotary-scaling-factor 0.5", "is not a number of 1 or more"),
        ("--rotary-scaling-factor 4 --mscale 0.7", "multiplies by m(0.7): use --rope-scaling yarn with"),
        ("--num-experts 8 --moe-layer-freq [0,1,1,0]", "is not every Nth block from a first one on"),
        ("--num-experts 8 --moe-layer-freq [0]*4", "has no block with experts: leave --num-experts out"),
        ("--moe-layer-freq [1]*3", "is for 3 blocks, and --num-layers is 4: use a list of 4"),
        ("--data-parallel-sharding-strategy all", "use no_shard, optim, optim_grads or optim_grads_params"),
        ("--fp8-format hybrid --fp8-e4m3", "--fp8-format and --fp8-e4m3 are Megatron-LM flags: leave them out"),
    ],
)
def test_what_megacore_does_otherwise_is_refused(given: str, said: str, refuse: Refuse) -> None:
    text = " ".join(SCRIPT)
    start = (text.replace(" --micro-batch-size 1", "") if "--micro-batch-size" in given else text).split()
    assert any(said in problem for problem in problems(refuse(*start, *words(given))))


def test_a_script_for_an_encoder_and_a_decoder_is_refused(refuse: Refuse) -> None:
    argv = words(
        "--encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 --num-attention-heads 12 "
        "--encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 2048 --micro-batch-size 64 "
        "--global-batch-size 512 --lr 0.0001 --train-iters 10 --vocab-extra-ids 100 --mock-data --vocab-size 100"
    )
    found = problems(refuse(*argv))
    assert len(found) == 4
    assert any("--decoder-num-layers and --decoder-seq-length are Megatron-LM flags" in problem for problem in found)
