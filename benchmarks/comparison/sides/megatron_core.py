"""Megatron-Core on a CPU, for which it is not made: where it asks for CUDA by name, it gets the CPU (`without_cuda`).

GPTModel with the layers of Megatron-Core itself (no Transformer Engine), its DistributedDataParallel, its pipelines and
its optimizers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.comparison.job import BETAS, EPS, LR, WEIGHT_DECAY, Job, Layout, Step, Unsupported
from benchmarks.comparison.plain import microbatches

_NAMES = {
    "embedding.word_embeddings.weight": "embedding.tokens.weight",
    "embedding.position_embeddings.weight": "embedding.positions",
    "decoder.final_layernorm": "head.norm",
    "output_layer.weight": "head.weight",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "input_layernorm": "attention_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
}


def name(layout: Layout) -> str:
    """What is measured."""
    return "Megatron-Core" + (": distributed optimizer" if layout.zero else "")


class OnCPU(TorchFunctionMode):
    """Makes tensors on the CPU that are asked for on CUDA, and calls CPU tensors those of CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        return "torch.cuda.FloatTensor" if isinstance(result, str) and result == "torch.FloatTensor" else result


def _on_cpu(function: Any) -> Any:
    """A function of torch that makes a tensor on the CPU where it is asked for one on CUDA."""

    def make(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        made: Tensor = function(*args, **kwargs)
        return made

    return make


def without_cuda() -> None:
    """For the rest of the process; in a step it costs nothing that can be measured."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    for function in ("empty", "tensor", "zeros"):
        setattr(torch, function, _on_cpu(getattr(torch, function)))
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()


def build(job: Job) -> Step:
    """A step of Megatron-Core's training loop."""
    layout = job.layout
    if layout.zero > 1 or layout.schedule == "zero-bubble":
        raise Unsupported("Megatron-Core has ZeRO 1, 1F1B and interleaved schedules here")
    if layout.sequence_parallel:
        raise Unsupported("its sequence parallelism wants the norms of Apex or Transformer Engine, which need CUDA")
    without_cuda()
    dist.init_process_group("gloo")
    virtual = layout.virtual_stages if layout.virtual_stages > 1 else None
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, virtual)
    with OnCPU():
        config = _config(job)
        models = [_model(job, config, chunk) for chunk in range(layout.virtual_stages)]
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=LR, weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
                adam_eps=EPS, clip_grad=0.0, use_distributed_optimizer=layout.zero == 1,
            ),
            models,
        )  # fmt: skip
    for group in optimizer.param_groups:  # as its scheduler does in every step: vectors do not decay
        group["weight_decay"] = WEIGHT_DECAY * group["wd_mult"]
    config.finalize_model_grads_func = finalize_model_grads
    run = get_forward_backward_func()
    batches = microbatches(job, parallel_state.get_data_parallel_rank())
    mask = torch.ones(job.sizes.seq, job.sizes.seq, dtype=torch.bool).triu(1)[None, None]
    position_ids = torch.arange(job.sizes.seq)[None].expand(job.micro_batch, -1)

    def forward(batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
        tokens, labels = next(batches)
        return model(tokens, position_ids, mask, labels=labels), _mean

    def step() -> float | None:
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        # Every chunk of a rank reads the same microbatches.
        drawn = [next(batches) for _ in range(layout.microbatches)]
        losses = run(
            forward_step_func=forward, data_iterator=[iter(drawn) for _ in models] if virtual else iter(drawn),
            model=models if virtual else models[0], num_microbatches=layout.microbatches, seq_length=job.sizes.seq,
            micro_batch_size=job.micro_batch, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        return float(sum(loss["loss"].item() for loss in losses) / len(losses)) if losses else None

    return step


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.mean()
    return loss, {"loss": loss.detach().clone()}  # its schedules divide the loss in place


def _config(job: Job) -> TransformerConfig:
    layout, sizes = job.layout, job.sizes
    pipeline: dict[str, Any] = {}
    if layout.pp > 1:
        kinds = {0: "embedding", sizes.layers + 1: "loss"}
        cut = [[kinds.get(layer, "decoder") for layer in range(*stage)] for stage in job.stages]
        pipeline["pipeline_model_parallel_layout"] = cut
        if layout.virtual_stages > 1:
            pipeline["virtual_pipeline_model_parallel_size"] = layout.virtual_stages
    fused = ("bias_activation", "bias_dropout", "masked_softmax", "gradient_accumulation")  # need CUDA
    return TransformerConfig(
        num_layers=sizes.layers, hidden_size=sizes.hidden, num_attention_heads=sizes.heads,
        hidden_dropout=0.0, attention_dropout=0.0, activation_func=functools.partial(F.gelu, approximate="tanh"),
        use_cpu_initialization=True, perform_initialization=job.weights is None, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.sequence_parallel,
        batch_p2p_comm=False,  # gloo matches the messages of a batch to one rank by their order, NCCL by direction
        **{f"{what}_fusion": False for what in fused}, **pipeline,
    )  # fmt: skip


def _model(job: Job, config: TransformerConfig, chunk: int) -> Any:
    vp_stage = chunk if job.layout.virtual_stages > 1 else None
    of_stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=job.sizes.vocab,
        max_sequence_length=job.sizes.seq, share_embeddings_and_output_weights=False, vp_stage=vp_stage,
        pre_process=parallel_state.is_pipeline_first_stage(**of_stage),
        post_process=parallel_state.is_pipeline_last_stage(**of_stage),
    )  # fmt: skip
    if job.weights is not None:
        _load(model, job)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=job.layout.zero == 1)
    return DistributedDataParallel(config, settings, model)


@torch.no_grad()
def _load(model: GPTModel, job: Job) -> None:
    """This rank's slices of the job's weights."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    assert job.weights is not None
    with np.load(job.weights) as values:
        for theirs, parameter in model.named_parameters():
            whole = torch.from_numpy(values[_megacore_name(model, theirs)])
            for dimension, size in enumerate(parameter.shape):
                if size != whole.shape[dimension]:
                    whole = whole.narrow(dimension, rank * size, size)
            parameter.copy_(whole)


def _megacore_name(model: GPTModel, theirs: str) -> str:
    block = ""
    if theirs.startswith("decoder.layers."):
        _, _, number, theirs = theirs.split(".", 3)
        block = f"blocks.{model.decoder.layers[int(number)].layer_number - 1}."
    prefix = next(prefix for prefix in _NAMES if theirs.startswith(prefix))
    return block + _NAMES[prefix] + theirs.removeprefix(prefix)
