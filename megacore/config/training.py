"""The section of training: batch sizes, steps, evaluation, recomputation, kernels, loss, and the output directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from megacore.config.fields import Flag, Range, Section
from megacore.config.rules import Needs, Rule, rows

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """Batch sizes, number of steps, evaluation, recomputation, loss, and the output directory."""

    rules: ClassVar[Sequence[Rule]] = (*rows("training"),)

    micro_batch_size: Annotated[int, Range(1, 1_000_000)] = 1
    """Samples in one forward pass of one replica."""
    global_batch_size: Annotated[int | None, Range(1, 1_000_000)] = None
    """Samples per step over all replicas. A multiple of --micro-batch-size x --dp. Default: --micro-batch-size x
    --dp."""
    train_iters: Annotated[int, Range(1), Flag(example=1000)]
    """Training steps, counted from the start of the run, before any resume."""
    seed: Annotated[int, Range(0, MAX_SEED)] = 1234
    """Seed of initial weights, dropout and data order. On cuda, repeating a run bitwise needs --deterministic or
    --reproducible."""
    deterministic: bool = False
    """Makes two runs with the same seed and layout bitwise equal on cuda, as they always are on CPUs."""
    reproducible: bool = False
    """Makes losses and weights bitwise equal for every layout, --zero-stage and schedule with the same
    --micro-batch-size. Slower; a gradient takes 8 bytes during accumulation (docs/explain/numerics.md)."""
    reproducible_blocks: Annotated[int | None, Range(1)] = None
    """Blocks into which --reproducible divides every sum that --tp or --cp would split: a power of two that --tp
    divides. Only runs with the same number are bitwise equal. Default: the largest of 8, 4, 2 and 1 that divides the
    model."""
    eval_interval: Annotated[int, Range(0)] = 1000
    """Steps between evaluations on the validation split. 0: none."""
    eval_iters: Annotated[int | None, Range(0)] = None
    """Global batches per evaluation. 0: no evaluation. Default: a tenth of the steps between evaluations, from 1 to
    100."""
    skip_train: bool = False
    """Evaluates the model of --load, --init-from-hf or --pretrained-checkpoint once instead of training. Saves no
    checkpoint."""
    output_dir: Annotated[str, Flag(metavar="DIR")] = "output"
    """Directory for checkpoints, metrics.jsonl and the resolved config.toml."""
    max_bad_steps: Annotated[int, Range(1)] = 10
    """Consecutive bad steps that stop the run. A bad step has a loss or gradient that is not finite, and leaves the
    weights unchanged. With a dynamic loss scale only the loss counts."""
    recompute: Literal["none", "selective", "light", "full"] = "none"
    """What backward computes again instead of saving it. selective: attention between its projections. light: outputs
    of norms and of the MLP's activation, without effect with --compile. full: whole blocks, the least memory for about
    a third more time. Results are bitwise the same."""
    recompute_num_layers: Annotated[int | None, Range(1), Flag(), Needs(recompute="full")] = None
    """First blocks of each pipeline stage that --recompute full applies to. Default: all of them."""
    offload_activations: bool = False
    """Copies saved activations to host memory while the next block computes, and back in backward. The device holds
    those of two blocks. No effect on a CPU."""
    distribute_saved_activations: Annotated[bool, Needs(recompute="full")] = False
    """Shards the block inputs that --recompute full saves over the --tp ranks. --sequence-parallel already does."""
    attention: Literal["auto", "sdpa", "fused-softmax"] = "auto"
    """Implementation of attention. sdpa: torch's fused operator; above 1024 positions some masks run in blocks
    (docs/explain/kernels.md). fused-softmax: separate products, which keep the attention weights in memory. auto:
    sdpa."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Implementation of norms, activations, softmax and cross-entropy. auto: triton on cuda if it is installed, else
    torch."""
    cuda_graphs: bool = False
    """Captures forward and backward of blocks and launches each as one, where the host is slower than the GPU."""
    compile: bool = False
    """Compiles blocks and loss with torch.compile. The first step takes a minute or more. With --loss-chunks 2 or more
    the loss is not compiled."""
    compile_backend: Literal["inductor", "aot-eager"] = "inductor"
    """Backend of --compile. inductor: generates kernels; on the CPU it needs a C++ compiler. aot-eager: PyTorch's
    operators, to find out whether capture or generated code changes a result."""
    label_smoothing: Annotated[float, Range(0, below=1)] = 0.0
    """Share of the target probability that is spread over the vocabulary. Not in evaluations."""
    z_loss: Annotated[float, Range(0)] = 0.0
    """Adds this times log(sum(exp(logits)))^2 to the training loss, which keeps logits small. Not in evaluations."""
    loss_chunks: Annotated[int | None, Range(1, 1024), Flag()] = None
    """Chunks of the tokens in which the output head computes logits and loss. With several, forward computes the head's
    gradients too. Default: the fewest with at most 2 GiB of logits."""
    memory_check: bool = True
    """Refuses a run that needs more memory than is available, and says what would fit (docs/guides/memory.md)."""


@dataclass(frozen=True, kw_only=True)
class ResolvedTraining(TrainingConfig):
    """The training section of a run whose number of processes is known."""

    global_batch_size: int = field()
    eval_iters: int = field()
