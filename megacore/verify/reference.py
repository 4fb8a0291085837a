"""The other side of the comparison: the same steps on one process, and how much rounding changes them. It is megacore
too, and a bug in a layer does the same to both sides. So its gradients are computed once more without megacore's
runtime, buckets and loss weight, and its updates with torch.optim."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.checkpoint.save import CheckpointSaver
from megacore.config import AdamConfig, AdamWConfig, ResolvedConfig, SGDConfig
from megacore.config.reproducible import canonical_blocks
from megacore.layers import moe
from megacore.models.spec import DescribesLayers
from megacore.parallel.mesh import Mesh
from megacore.train.gpt_task import GPTTask
from megacore.train.step import TrainStep
from megacore.verify.masks import masks_of_shards
from megacore.verify.narrow import LR, WARMUP_LR, WARMUP_STEPS, one_process
from megacore.verify.run import Array, Key, Record, Recorder, assemble, batches, load_steps, make_task

_PERTURBED_RUNS = 3
LARGEST = 0.1
"""A tensor whose tolerance is larger is zero but for rounding, and says nothing."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process computes."""

    checkpoint: Path  # from which every run starts
    record: Record  # of the one-process run
    perturbed: tuple[Record, ...]  # the same run from weights that differ by one unit in the last place, several times
    # Relative difference of the losses of each step between one-process runs with two micro-batch sizes, without
    # dropout.
    loss_spread: tuple[float, ...]
    micro_batch_sizes: tuple[int, int]
    checks: tuple[Check, ...]  # results of the independent checks


@dataclass(frozen=True, kw_only=True)
class Check:
    """One independent check of the one-process run."""

    name: str  # what was compared with what
    worst: float  # relative difference of the tensor that is nearest to its tolerance, or furthest above it
    tolerance: float
    tensors: int

    @property
    def agrees(self) -> bool:
        return self.tensors > 0 and self.worst <= self.tolerance


def relative_difference(actual: Array, expected: Array) -> float:
    """The Frobenius norm of the difference over that of `expected`; infinite where either is not finite."""
    if actual.shape != expected.shape or not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return float("inf")
    difference, size = float(np.linalg.norm(actual - expected)), float(np.linalg.norm(expected))
    return difference / size if size else (float("inf") if difference else 0.0)


def make_reference(config: ResolvedConfig, directory: Path, device: torch.device, layers: DescribesLayers) -> Reference:
    """Train on one process, save a checkpoint on the way, and measure."""
    one_rank, mesh = one_process(config), Mesh(device=device)
    checkpoint, warm = _warm_up(one_rank, mesh, directory, layers)

    def run(of: ResolvedConfig = one_rank, *, seed: int | None = None) -> Record:
        """The recorded steps; with a seed from weights that are perturbed by one unit in the last place."""
        steps = load_steps(of, mesh, checkpoint, layers)
        if seed is not None:
            _perturb(steps, seed)
        recorder = Recorder(steps)
        recorder.run(batches(of, mesh, steps.task, after=WARMUP_STEPS), masks=_masks(config))
        return assemble({0: recorder.pieces})

    record = run()
    for key, values in warm.tensors.items():
        if not np.array_equal(values, record.tensors[key]):
            record.disagreements[key] = "one process loads other bits than it saved"
    perturbed = tuple(run(seed=seed) for seed in range(1, _PERTURBED_RUNS + 1))
    # Two micro-batch sizes draw other dropout masks: how far apart they are is measured without dropout.
    training = one_rank.training
    batch, size = training.global_batch_size, training.micro_batch_size
    sizes = size, 1 if size > 1 else next(n for n in range(2, batch + 1) if batch % n == 0)
    undropped = replace(one_rank, model=replace(one_rank.model, hidden_dropout=0.0, attention_dropout=0.0))
    losses = []
    for micro in sizes:
        tensors = run(replace(undropped, training=replace(training, micro_batch_size=micro))).tensors
        losses.append([values for key, values in tensors.items() if key.kind == "loss"])
    updates = _check_updates(one_rank, record)
    kept = replace(training, recompute="none", recompute_num_layers=None, distribute_saved_activations=False)
    steps = load_steps(replace(one_rank, training=kept), mesh, checkpoint, layers)
    view, gradients = _check_view(steps), check_gradients(config, steps, record, perturbed)
    return Reference(
        checkpoint=checkpoint,
        record=record,
        perturbed=perturbed,
        loss_spread=tuple(relative_difference(a, b) for a, b in zip(*losses, strict=True)),
        micro_batch_sizes=sizes,
        checks=tuple(check for check in (updates, view, *gradients) if check is not None),
    )


def _warm_up(config: ResolvedConfig, mesh: Mesh, directory: Path, layers: DescribesLayers) -> tuple[Path, Record]:
    """A few steps from the initial weights: at initialisation every loss is near ln V, which hides defects."""
    config = replace(config, optimizer=replace(config.optimizer, lr=WARMUP_LR))
    steps = TrainStep(make_task(config, mesh, layers), config, mesh)
    source = batches(config, mesh, steps.task, after=0)
    for _ in range(WARMUP_STEPS):
        steps.compute_gradients(next(source))
        steps.update_weights()
    saver = CheckpointSaver(config.saving_to(str(directory)), mesh)
    saver.begin(steps.state(consumed_samples=WARMUP_STEPS * config.training.global_batch_size))
    saved = saver.finish()
    assert saved is not None
    recorder = Recorder(steps)
    recorder.note_state()
    return Path(str(saved.path)), assemble({0: recorder.pieces})


def _masks(layout: ResolvedConfig) -> contextlib.AbstractContextManager[None]:
    """One process draws the masks of a layout inside."""
    parallel = layout.parallel
    # Compiled code draws hidden dropout by itself, and in canonical blocks no mask depends on the layout.
    if layout.training.compile or canonical_blocks(layout) > 1:
        return contextlib.nullcontext()
    return masks_of_shards(parallel.tp, cp=parallel.cp, sequence_parallel=bool(parallel.sequence_parallel))


@torch.no_grad()
def _perturb(steps: TrainStep, seed: int) -> None:
    """Move every weight by one unit in the last place, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    for local in steps.model.data_parallel.segments:
        signs = torch.empty(local.master.shape).bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)
        local.master.copy_(torch.nextafter(local.master, (signs * torch.inf).to(local.master.device)))
    steps.model.data_parallel.publish()


# ---- independent checks


def _is_matrix(name: str, weight: Tensor) -> bool:
    """Whether weight decay is for it; biases of experts [E, o] are vectors of each expert."""
    return weight.dim() >= 2 and not name.endswith("bias")


def _check_updates(config: ResolvedConfig, record: Record) -> Check | None:
    """torch.optim on the recorded gradients, clipped by torch, must give the recorded weight changes; None for an
    optimizer that torch does not have."""
    settings, optimizer, tensors = config.optimizer_settings, config.optimizer, record.tensors
    state: dict[str, dict[str, Any]] = {key.name: {} for key in tensors if key.kind == "loaded weight"}
    weights = {name: _parameter(tensors[Key(0, "loaded weight", name)]) for name in state}
    groups = [
        {"params": [p for name, p in weights.items() if _is_matrix(name, p) is matrix], "weight_decay": decay}
        for matrix, decay in ((True, optimizer.weight_decay), (False, 0.0))
    ]
    twin: torch.optim.Optimizer
    if isinstance(settings, AdamWConfig | AdamConfig):
        kind = torch.optim.AdamW if isinstance(settings, AdamWConfig) else torch.optim.Adam
        betas = config.adamw.adam_beta1, config.adamw.adam_beta2
        twin = kind(groups, lr=LR, betas=betas, eps=config.adamw.adam_eps)
        state = {name: {"step": torch.tensor(float(WARMUP_STEPS))} for name in weights}
    elif isinstance(settings, SGDConfig):
        twin = torch.optim.SGD(groups, lr=LR, momentum=settings.sgd_momentum, nesterov=settings.sgd_nesterov)
    else:
        return None
    for key in (key for key in tensors if key.kind == "loaded moment"):
        name, moment = key.name.split(" ")[:2]
        state[name][moment] = torch.tensor(tensors[key], dtype=torch.float32)
    for name, weight in weights.items():
        twin.state[weight] = state[name]
    differences = []
    for step in sorted({key.step for key in tensors if key.kind == "weight change"}):
        before = {name: weight.detach().double().numpy().copy() for name, weight in weights.items()}
        for name, weight in weights.items():
            gradient = tensors.get(Key(step, "gradient", name))
            weight.grad = None if gradient is None else torch.tensor(gradient, dtype=torch.float32)
        adaptive = tensors.get(Key(step, "clip limit", ""))  # its rule is --clip-grad's too
        if limit := optimizer.clip_grad if adaptive is None else float(adaptive[0]):
            torch.nn.utils.clip_grad_norm_(weights.values(), limit)
        twin.step()
        for name, weight in weights.items():
            change = weight.detach().double().numpy() - before[name]
            differences.append(relative_difference(change, tensors[Key(step, "weight change", name)]))
    return Check(
        name=f"weight changes of one process against torch.optim.{type(twin).__name__} on its gradients",
        worst=max(differences, default=0.0),
        tolerance=1e-3,  # a change is a difference of fp32 weights, of which it is about a thousandth
        tensors=len(differences),
    )


@torch.no_grad()
def _check_view(steps: TrainStep) -> Check | None:
    """A token is another: what the last block gives for positions that must not see it stays as it was. None where a
    token may change any other: in BERT, through the capacity of experts, and in a program's own layers."""
    config, (stage,) = steps.config, steps.model.chunks
    drops = config.experts.moe_expert_capacity_factor is not None
    if not config.is_causal or drops or steps.task.layers_from == "program":
        return None
    model, outputs, differences = config.model, list[Tensor](), list[float]()
    microbatch = steps.task.of_rank(next(iter(batches(config, steps.mesh, steps.task, after=WARMUP_STEPS)))[0])
    last = stage.layers[-2 - model.mtp_num_layers]
    keep = last.register_forward_hook(lambda _, __, y: outputs.append(y[0] if isinstance(y, tuple) else y))
    stage.eval()
    b, s = microbatch.tokens.shape
    documents = getattr(microbatch, "documents", torch.zeros_like(microbatch.tokens))
    reach = s if model.window_size is None or model.layer_pattern else model.num_layers * (model.window_size - 1) + 1
    for place in (None, 0, s // 2 - 1, s - 1):
        tokens = microbatch.tokens.clone()
        if place is not None:
            tokens[:, place] = (tokens[:, place] + 1) % model.vocab_size
        changed = replace(microbatch, tokens=tokens)
        stage(steps.task.first_input(changed), partial(steps.task.last_inputs, None, changed))
        if place is not None:
            distance = torch.arange(s) - place
            sees = (distance >= 0) & (distance < reach) & (documents == documents[:, place : place + 1]).cpu()
            before, after = (x[~sees.expand(b, s)].double().numpy(force=True) for x in (outputs[0], outputs[-1]))
            differences.append(relative_difference(after, before))
    keep.remove()
    return Check(
        name="outputs of one process against those with other tokens where they must not see",
        worst=max(differences),
        tolerance=1e-5,
        tensors=len(differences),
    )


def _parameter(values: Array) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float32))


def rounding_of_sums(config: ResolvedConfig, measured: float) -> float:
    """How far two fp32 computations of one gradient, in different orders, may be from each other, relative.

    A sum of n products is that of factors which are off by sqrt(n) units of rounding, if the errors are independent
    (Higham and Mary 2019, doi 10.1137/18M1226312, of the backward error). What one unit in all factors does to a
    gradient, whose terms may cancel, is measured. Both computations err, each by itself: sqrt(2).

    Args:
        config: narrowed; has the sizes of the sums.
        measured: relative change of the gradient where each weight moves by one unit in the last place.
    """
    model, training = config.model, config.training
    inner = [model.hidden_size, model.ffn_hidden_size, model.num_attention_heads * model.kv_channels, model.vocab_size]
    longest = max(*inner, training.global_batch_size * config.data.seq_length)
    return math.sqrt(2.0 * longest) * max(measured, torch.finfo(torch.float32).eps / 2.0)


def check_gradients(
    layout: ResolvedConfig, steps: TrainStep, record: Record, perturbed: Sequence[Record]
) -> Iterator[Check]:
    """torch.autograd over the layers, called one after the other and without recomputation, must give the recorded
    gradients of step 1; the choices of routers, counted here, the recorded loads of experts."""
    (stage,) = steps.model.chunks
    is_own = steps.task.layers_from == "program"
    routers = _Routers(steps) if _Routers.are_known(steps.config) and not is_own else None
    stage.runner = None
    stage.train()
    source = batches(steps.config, steps.mesh, steps.task, after=WARMUP_STEPS)
    microbatches = [steps.task.of_rank(microbatch) for microbatch in next(iter(source))]
    counts = sum(steps.task.counts(microbatch) for microbatch in microbatches)
    assert isinstance(counts, Tensor)
    per_count = torch.where(counts > 0, 1.0 / counts, 0.0)
    parameters = steps.model.parameters
    for parameter in parameters.values():
        parameter.take_term = parameter.accumulator = None  # autograd adds up all uses
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    with _masks(layout), routers or contextlib.nullcontext():
        for microbatch in microbatches:
            steps.task.streams.microbatch = microbatch.index
            output = stage(steps.task.first_input(microbatch), partial(steps.task.last_inputs, None, microbatch))
            loss = (_plain_loss(steps, output, microbatch) * per_count * steps.task.loss_factors).sum()
            loss = loss if routers is None else loss + routers.losses()
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    sums[name] += gradient
    compared: list[tuple[float, float]] = []  # the difference of each gradient, and how large it may be
    for key, values in record.tensors.items():
        if key[:2] == (1, "gradient"):
            measured = max(relative_difference(run.tensors[key], values) for run in perturbed)
            tolerance = rounding_of_sums(steps.config, measured)
            if tolerance <= LARGEST:
                found = parameters[key.name].spec.unpadded(sums[key.name]).numpy(force=True)
                compared.append((relative_difference(found, values), tolerance))
    worst, tolerance = max(compared, key=lambda pair: pair[0] / pair[1], default=(0.0, 0.0))
    yield Check(
        name="gradients of one process against torch.autograd over its layers",
        worst=worst,
        tolerance=tolerance,
        tensors=len(compared),
    )
    if routers is not None:
        recorded = [values for key, values in record.tensors.items() if key[:2] == (1, "expert load")]
        pairs = list(zip(routers.counts, recorded, strict=True))
        loads = [relative_difference(counts.double().numpy(force=True), values) for counts, values in pairs]
        yield Check(
            name="expert loads of one process against the choices of its routers",
            worst=max(loads),
            tolerance=0.0,
            tensors=len(loads),
        )


class _Routers(contextlib.ExitStack):
    """Counts the choices of a model's routers and computes their losses, from their logits and the formulas
    (DeepSeek-AI 2024, arXiv 2412.19437, equations 17 to 20; Zoph et al. 2022, arXiv 2202.08906, equation 5). What the
    layers inject is left out inside."""

    def __init__(self, steps: TrainStep) -> None:
        super().__init__()
        self._steps, self._logits = steps, list[tuple[Tensor, Tensor | None]]()
        self.counts: list[Tensor] = []  # of each router, [E], of all microbatches
        self.enter_context(patch.object(moe, "with_loss", lambda x, loss, scale: x))
        for module in steps.model.chunks[0].modules():
            if isinstance(module, moe.Router):
                self.callback(module.register_forward_hook(self._note).remove)

    @staticmethod
    def are_known(config: ResolvedConfig) -> bool:
        """Whether the choices and the losses follow from the logits of a microbatch."""
        experts = config.model.experts
        groups = experts is not None and experts.moe_router_num_groups is not None
        return experts is not None and not (groups or experts.uses_last_loads or config.beside_hidden_states)

    def _note(self, router: moe.Router, inputs: Any, logits: Tensor) -> None:
        self._logits.append((logits, router.bias))

    def losses(self) -> Tensor:
        """Of the last microbatch, divided by the sequences of the global batch."""
        config, counts, total = self._steps.config.experts, list[Tensor](), torch.zeros(())
        for logits, bias in self._logits:
            scores = logits.softmax(-1) if config.moe_router_score_function == "softmax" else logits.sigmoid()
            chosen = (scores if bias is None else scores + bias).topk(config.moe_router_topk).indices
            of_sequences = F.one_hot(chosen, logits.shape[-1]).sum((1, 2))  # [b, E]
            parts = of_sequences / of_sequences.sum(-1, keepdim=True) * logits.shape[-1]
            balance = (parts * (scores / scores.sum(-1, keepdim=True)).mean(1)).sum()
            total = total + config.moe_aux_loss_coeff * balance
            total = total + (config.moe_z_loss_coeff or 0.0) * logits.logsumexp(-1).square().mean(1).sum()
            counts.append(of_sequences.sum(0))
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)] if self.counts else counts
        self._logits.clear()
        return total / self._steps.config.training.global_batch_size


def _plain_loss(steps: TrainStep, output: Any, microbatch: Any) -> Tensor:
    """Summed loss: torch's cross-entropy where the model gives logits and has no z-loss, else the task's."""
    task, training = steps.task, steps.config.training
    if not isinstance(task, GPTTask) or task.head_has_loss or training.z_loss:
        return task.loss(output, microbatch)
    outputs = output if isinstance(output, tuple) else (output,)  # with multi-token prediction one for each depth
    targets, masks = (x.reshape(len(outputs), -1) for x in (microbatch.labels, microbatch.loss_mask))
    sums = []
    for one, labels, mask in zip(outputs, targets, masks, strict=True):
        logits = one[..., : steps.config.model.vocab_size].float().flatten(0, 1)
        per_token = F.cross_entropy(logits, labels, reduction="none", label_smoothing=training.label_smoothing)
        sums.append((per_token * mask).sum())
    return torch.stack(sums)
