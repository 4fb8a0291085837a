"""DeepSpeed: ZeRO 0 to 3, PipelineModule, and AutoTP for the blocks."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

from benchmarks.comparison.job import Job, Layout, Step, Unsupported
from benchmarks.comparison.plain import PlainGPT, adamw, cross_entropy, microbatches


def name(layout: Layout) -> str:
    """What is measured."""
    if layout.pp > 1:
        return "DeepSpeed: PipelineModule" + (f", ZeRO {layout.zero}" if layout.zero else "")
    split = "AutoTP, " if layout.tp > 1 else ""
    return f"DeepSpeed: {split}ZeRO {layout.zero}"


def build(job: Job) -> Step:
    """A step as DeepSpeed's tutorials write it."""
    layout = job.layout
    if layout.sequence_parallel:
        raise Unsupported("AutoTP splits no norms")
    if layout.pp > 1 and (layout.tp > 1 or layout.zero > 1 or layout.schedule not in ("default", "1f1b")):
        raise Unsupported("PipelineModule has 1F1B, data parallelism and ZeRO 1")
    deepspeed.init_distributed(dist_backend="gloo")
    if layout.pp > 1:
        return _pipeline(job)
    replicas = torch.distributed.get_rank() // layout.tp
    model, batches = PlainGPT(job), microbatches(job, replicas)
    engine = _engine(job, model)

    def step() -> float:
        tokens, labels = next(batches)
        loss = cross_entropy(engine(tokens), labels)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step


def _engine(job: Job, model: Any) -> Any:
    """DeepSpeed's engine, with torch's fused AdamW, which is faster on a CPU than DeepSpeed's choice."""
    config: dict[str, Any] = {
        "gradient_accumulation_steps": job.layout.microbatches, "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_clipping": 0.0, "steps_per_print": 1 << 30, "zero_optimization": {"stage": job.layout.zero},
    }  # fmt: skip
    if job.layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": job.layout.tp, "partition_config": _SPLIT}
    return deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]


_SPLIT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.attention\.qkv\.weight$", r".*\.mlp\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.attention\.output\.weight$", r".*\.mlp\.down\.weight$"], "partition_type": "row"},
    ],
}


def _pipeline(job: Job) -> Step:
    stages, degrees = [LayerSpec(PlainGPT, job, stage) for stage in job.stages], {"num_stages": job.layout.pp}
    module = PipelineModule(stages, **degrees, loss_fn=cross_entropy, partition_method="uniform")
    engine = _engine(job, module)
    batches = microbatches(job, engine.grid.get_data_parallel_rank())
    return lambda: float(engine.train_batch(data_iter=batches).item())
