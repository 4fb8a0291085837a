"""The section of training: batch sizes, steps, evaluation, recomputation, kernels, loss, and the output directory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from megacore.config.fields import Flag, Range, Section, use
from megacore.config.problem import Change, Problem

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """Batch sizes, number of steps, evaluation, recomputation, loss, and the output directory."""

    micro_batch_size: Annotated[int, Range(1, 1_000_000)] = 1
    """Number of samples in a microbatch: one forward pass of one replica."""
    global_batch_size: Annotated[int | None, Range(1, 1_000_000)] = None
    """Number of samples per step over all replicas. A multiple of --micro-batch-size x --dp. Default:
    --micro-batch-size x --dp, one microbatch per replica."""
    train_iters: Annotated[int, Range(1)]
    """Number of training steps, counted from the start of the run, before any resume."""
    seed: Annotated[int, Range(0, MAX_SEED)] = 1234
    """Seed of the initial weights, dropout and data order. Two runs with the same seed and layout are bitwise equal on
    CPUs; on cuda only with --deterministic or --reproducible."""
    deterministic: bool = False
    """Chooses operators that add in the same order each time: two runs with the same seed and layout are bitwise equal
    on cuda too. Without effect on CPUs, where they always are. --reproducible includes it."""
    reproducible: bool = False
    """Makes losses and weights bitwise equal for every --tp, --cp, --pp, --dp, --ep, --zero-stage and schedule, with
    the same --micro-batch-size. Slower; a gradient takes 8 bytes during accumulation (docs/explain/numerics.md)."""
    reproducible_blocks: Annotated[int | None, Range(1)] = None
    """Number of blocks into which --reproducible divides every sum that --tp or --cp would split: a power of two
    that --tp divides. Runs with the same number are bitwise equal. 1: sums are not divided, and another --tp rounds
    differently. Default: the largest of 8, 4, 2 and 1 into which the model can be divided."""
    eval_interval: Annotated[int, Range(0)] = 1000
    """Number of steps between evaluations on the validation split. 0: no evaluation."""
    eval_iters: Annotated[int | None, Range(0)] = None
    """Number of global batches per evaluation. 0: no evaluation, as with --eval-interval 0. Default: a tenth of the
    steps between two evaluations, from 1 to 100."""
    skip_train: bool = False
    """Evaluates once instead of training, and saves no checkpoint: the model of --load, --init-from-hf or
    --pretrained-checkpoint on the validation split."""
    output_dir: Annotated[str, Flag(metavar="DIR")] = "output"
    """Output directory for checkpoints, metrics.jsonl and the resolved config.toml. Created if it does not exist."""
    max_bad_steps: Annotated[int, Range(1)] = 10
    """Stops the run after this many consecutive bad steps. A step is bad if its loss or gradient is not finite; it
    leaves the weights unchanged. With a dynamic loss scale only the loss counts."""
    recompute: Literal["none", "selective", "light", "full"] = "none"
    """Activation recomputation (activation checkpointing): what backward computes again instead of saving it in
    memory. selective: attention between its projections. light: the outputs of norms and of the MLP's activation,
    but no matrix product; it has no effect with --compile. full: whole transformer blocks; only their inputs are
    saved. The results are bitwise the same."""
    recompute_num_layers: Annotated[int | None, Range(1), Flag()] = None
    """Number of transformer blocks per pipeline stage that --recompute full applies to, from the first. Default: all
    of them."""
    offload_activations: bool = False
    """Copies the activations that transformer blocks save for backward to host memory, while the next block
    computes, and back in backward. The device holds the activations of two blocks. On a CPU it does nothing,
    because they already are in host memory. The results are bitwise the same."""
    distribute_saved_activations: bool = False
    """Shards the block inputs that --recompute full saves over the --tp ranks, which all-gather them in backward. The
    results are bitwise the same. --sequence-parallel already shards them."""
    attention: Literal["auto", "sdpa", "fused-softmax"] = "auto"
    """Implementation of attention. sdpa: torch's fused operator; above 1024 positions windows, documents, ALiBi and
    (on a CPU) dropout run in blocks (docs/explain/kernels.md). fused-softmax: separate score, softmax and value
    products, which keep the attention weights in memory. auto: sdpa."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Implementation of norms, activations, softmax and cross-entropy. auto: triton on cuda if it is installed, else
    torch."""
    compile: bool = False
    """Compiles transformer blocks and the loss with torch.compile, which fuses their operators into fewer kernels. The
    first step takes a minute or more. With --loss-chunks 2 or more the loss is not compiled."""
    compile_backend: Literal["inductor", "aot-eager"] = "inductor"
    """Backend of --compile. inductor: generates kernels; on the CPU it needs a C++ compiler. aot-eager: runs PyTorch's
    operators, for finding out whether capture or generated code changes a result."""
    label_smoothing: Annotated[float, Range(0, below=1)] = 0.0
    """Label smoothing: share of the target probability that is spread evenly over the vocabulary. 0: off. Evaluations
    do not use it."""
    z_loss: Annotated[float, Range(0)] = 0.0
    """Weight of the z-loss, the square of the softmax's log-normaliser, in the training loss. 0: off. Evaluations do
    not use it."""
    loss_chunks: Annotated[int | None, Range(1, 1024), Flag()] = None
    """Number of chunks of the vocabulary in which the output head computes logits and loss, one chunk at a time.
    With more than one chunk, backward computes the logits again. Default: the fewest with at most 2 GiB of logits."""
    memory_check: bool = True
    """Refuses a run that needs more memory than is available, before it allocates anything, and says what would fit
    (docs/guides/memory.md)."""

    def constraints(self, wrong: frozenset[str]) -> Iterator[str]:
        for name in ("eval_interval", "eval_iters") if self.skip_train else ():
            if getattr(self, name) == 0 and not wrong & {"skip_train", name}:
                off = f"--{name.replace('_', '-')} 0"
                yield f"--skip-train only evaluates, which {off} turns off: leave one of them out"
        if not wrong & {"recompute", "recompute_num_layers"} and self.recompute_num_layers and self.recompute != "full":
            yield Problem(
                f"--recompute-num-layers {self.recompute_num_layers} has no effect with --recompute {self.recompute}",
                Change("leave it out", {"recompute_num_layers": None}),
                use("recompute", "full"),
            )
        if self.offload_activations and "offload_activations" not in wrong:
            if self.recompute == "light" and "recompute" not in wrong:
                yield (
                    "--offload-activations is not possible with --recompute light, which decides per tensor what to "
                    "save: use --recompute none, selective or full"
                )
            if self.compile and "compile" not in wrong:
                yield (
                    "--offload-activations is not possible with --compile, whose code keeps its activations itself: "
                    "leave one of them out"
                )
        if self.recompute != "full" and "recompute" not in wrong:
            how = f"--recompute {self.recompute}"
            yield from self.without_effect(("distribute_saved_activations",), wrong, how, "--recompute full")
        if not self.compile and "compile" not in wrong:
            yield from self.without_effect(("compile_backend",), wrong, "--no-compile", "--compile")


@dataclass(frozen=True, kw_only=True)
class ResolvedTraining(TrainingConfig):
    """The training section of a run whose number of processes is known."""

    global_batch_size: int = field()
    eval_iters: int = field()
