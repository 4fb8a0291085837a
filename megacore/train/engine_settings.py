"""The settings of `PipelineEngine` (engine.py), and the configuration they are: what is wrong is reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from megacore.config import (
    AverageConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    OptimizerSettings,
    ParallelConfig,
    PrecisionConfig,
    ResolvedConfig,
    SpikeConfig,
    TrainingConfig,
    WatchConfig,
    validate,
)
from megacore.config.dimensions import fill_degrees, size_of_role
from megacore.config.fields import field_infos
from megacore.config.messages import counted, did_you_mean, one_of
from megacore.config.optimizers import OPTIMIZERS
from megacore.config.schema import with_registered
from megacore.errors import ConfigError
from megacore.models.plain import Layer, describe_call, is_split, undivided
from megacore.parallel.compiled import Backend
from megacore.parallel.mesh import Mesh, world_size
from megacore.train.callbacks import Callback
from megacore.train.plain_task import Divide, LossFunction, divide_positions

S = TypeVar("S", OptimizerConfig, OptimizerSettings)
ChoosesOptimizer = OptimizerConfig | Callable[..., torch.optim.Optimizer]
"""The settings of an optimizer; or a class of torch's, or a `partial` of one."""
_REQUIRED = {"loss": "torch.nn.functional.mse_loss", "train_iters": "100"}


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The keyword arguments of `PipelineEngine`. None stands for the default of any of them."""

    loss: LossFunction  # (output of the last layer, targets) -> a scalar tensor
    train_iters: int  # steps of the run, over which the learning rate decays
    reduction: Literal["mean", "sum"] = "mean"  # whether `loss` returns the mean or the sum of what `count` counts
    # Targets -> how many terms the loss of a microbatch has (samples, or tokens that are not masked), a number or a
    # scalar tensor, by which microbatches are weighed; None: the samples, which is the first dimension of the inputs.
    # cp with reduction="mean" needs it.
    count: Callable[[Any], Tensor | float] | None = None
    num_microbatches: int = 1  # of one step, on each data-parallel replica
    # (shards, inputs, targets) -> this rank's positions of both, where cp ranks divide the sequences; by default of
    # every tensor of two dimensions or more, along the second.
    divide: Divide = divide_positions
    # tp, pp, dp, cp, schedule, ZeRO stage and so on. tp is for layers that are split, such as ColumnParallelLinear, cp
    # for layers that work on single positions, and megacore's attention; pipeline_layout and sequence_parallel are
    # GPT's.
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # Its learning-rate schedule and the clipping of gradients; or AdamW, Adam or SGD of torch.optim, or a `partial` of
    # it: then the learning rate is constant, and nothing is clipped.
    optimizer: ChoosesOptimizer = field(default_factory=OptimizerConfig)
    # Which optimizer, and its settings: `SGDConfig(sgd_momentum=0.8)`, followed in a list by those that it shares:
    # `[LambConfig(), AdamWConfig(adam_beta2=0.999)]`; None: the defaults of the one that `optimizer` names.
    optimizer_settings: OptimizerSettings | Sequence[OptimizerSettings] | None = None
    # Format of parameters and activations.
    precision: PrecisionConfig = field(default_factory=partial(PrecisionConfig, precision="fp32"))
    # "full" keeps only the input of each layer, and computes the layer again in backward.
    recompute: Literal["none", "full"] = "none"
    seed: int = 1234  # of initial weights and dropout
    reproducible: bool = False  # makes losses and weights bitwise the same for every pp, dp, ZeRO stage and schedule
    compile: bool = False  # run the layers as compiled code (torch.compile); what cannot be captured runs as it is
    compile_backend: Backend = "inductor"  # "inductor" generates kernels, "aot-eager" runs PyTorch's operators
    mesh: Mesh | None = None  # this rank's groups and device; None: made from `parallel`
    # Trackers for `log` and the steps to profile: `LoggingConfig(csv=True, wandb_project="mine")`.
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    output_dir: Path | str = "output"  # directory of metrics.csv, of the profile and of W&B's files
    # What to do at a spike of the loss or the gradient norm: none, warn or skip.
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    # Of the weights, and whether `evaluate` computes with it.
    average: AverageConfig = field(default_factory=AverageConfig)
    # Called on this rank, as `Trainer` calls them: around a step, after `log` (with what it is given), `evaluate` and
    # `save`, by `close`, and at an error in a step.
    callbacks: Sequence[Callback] = ()
    memory_check: bool = True  # refuse, before any layer is built, a model whose state needs more memory than there is
    # How often replicas are compared, and how long the ranks may stand still in a step before the watchdog names the
    # one that holds them up and ends the run (docs/guides/watching.md). One process is not watched.
    watch: WatchConfig = field(default_factory=WatchConfig)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EngineSettings:
        """From keyword arguments. Raises ConfigError that names those that do not exist, and those that are missing."""
        names = [one.name for one in dataclasses.fields(cls)]
        given = {name: value for name, value in given.items() if value is not None}
        problems = [
            f"PipelineEngine has no argument {name}{did_you_mean(name, names)}: leave it out"
            for name in given
            if name not in names
        ]
        problems += [f"{name} is missing: give {name}={such}" for name, such in _REQUIRED.items() if name not in given]
        if problems:
            raise ConfigError(problems)
        return cls(**given)

    def resolved(self, layers: Sequence[Layer]) -> ResolvedConfig:
        """The run's configuration; its model and data sections mean nothing. Raises ConfigError with everything that is
        wrong."""
        # The time of plain layers is not known: nothing can be chosen by it.
        balance = "parameters" if self.parallel.pipeline_balance == "time" else self.parallel.pipeline_balance
        parallel = dataclasses.replace(self.parallel, pipeline_balance=balance, schedule=self.parallel.schedule_name)
        replicas = max(1, size_of_role("batch", fill_degrees(parallel, world_size())))
        training = TrainingConfig(
            memory_check=self.memory_check,
            train_iters=self.train_iters,
            seed=self.seed,
            reproducible=self.reproducible,
            recompute=self.recompute,
            output_dir=str(self.output_dir),
            compile=self.compile,
            compile_backend=self.compile_backend,
            global_batch_size=self.num_microbatches * replicas,
        )
        optimizer, settings = self.optimizer, self.optimizer_settings
        problems: list[str] = []
        stages = parallel.pp * parallel.virtual_stages
        if not isinstance(optimizer, OptimizerConfig):
            optimizer, settings = _translated(optimizer, settings, problems)
        optimizer, chosen = _optimizer_of(optimizer, settings, problems)
        for name in ("log_interval", "trace", "trace_steps", "peak_tflops"):
            if (value := getattr(self.logging, name)) != field_infos(LoggingConfig)[name].default:
                problems.append(f"{name} {value} is GPT's, whose trainer logs by itself: leave it out")
        for name in ("ledger", "survive"):
            if getattr(self.watch, name):
                problems.append(f"{name} True is of GPT's and BERT's trainer: leave it out")
        if parallel.tp > 1 and not is_split(layers):
            problems.append(
                f"tp {parallel.tp}: no layer is split; use tp 1, or layers such as ColumnParallelLinear with "
                "group=mesh.layer"
            )
        if parallel.sequence_parallel:
            problems.append("sequence_parallel is GPT's and BERT's: leave it out")
        if parallel.cp > 1:
            problems += undivided(layers, parallel.cp)
            if training.reproducible:
                problems.append(
                    f"reproducible with cp {parallel.cp}: layers of your own sum gradients over the positions of a "
                    "rank, and round otherwise than one process: use cp 1, or leave reproducible out"
                )
            if self.reduction == "mean" and self.count is None:
                problems.append(
                    f'reduction "mean" with cp {parallel.cp} needs count, because the ranks of a sequence may differ '
                    'in their number of terms: give count=lambda targets: ..., or use reduction "sum"'
                )
            if parallel.cp_comm != "auto":
                problems.append(
                    f"cp_comm {parallel.cp_comm}: layers choose it; leave it out, and build them with "
                    f'SequenceShards(mesh.sequence, "{parallel.cp_comm}")'
                )
        if parallel.pipeline_layout is not None:
            problems.append(f"pipeline_layout {parallel.pipeline_layout} is GPT's: leave it out")
        if parallel.pipeline_balance == "flops":
            problems.append("pipeline_balance flops: those of a plain layer are not known; use parameters or uniform")
        if training.recompute not in ("none", "full"):
            problems.append(f"recompute {training.recompute} is of GPT's attention: use none or full")
        if self.precision.fp8 != "none":
            problems.append(f"fp8 {self.precision.fp8} is of GPT's and BERT's blocks: leave it out")
        if self.spikes.on_spike == "rollback":
            problems.append(
                "on_spike rollback: the engine does not read the data: use skip, or call load and choose other batches"
            )
        if stages > max(len(layers), 1):
            most = "1 stage" if len(layers) == 1 else f"{len(layers)} stages or less"
            problems.append(
                f"pp {parallel.pp} x virtual_stages {parallel.virtual_stages} = {stages} stages, but the model has "
                f"{counted(len(layers), 'layer')}: use {most}, or cut the model into more layers"
            )
        elif not problems:
            config = with_registered(Config)(
                model=ModelConfig(
                    num_layers=max(len(layers), 1),
                    vocab_size=1,
                    hidden_size=parallel.tp,
                    num_attention_heads=parallel.tp,
                ),
                data=DataConfig(mock_data=True, seq_length=1024 * parallel.cp),
                parallel=parallel,
                optimizer=optimizer,
                precision=self.precision,
                training=training,
                logging=self.logging,
                watch=self.watch,
                spikes=self.spikes,
                average=self.average,
                **chosen,
            )
            problems += validate(config, world_size())
            if not problems:
                return config.resolve(world_size())
        raise ConfigError(problems)


def _translated(
    optimizer: Any, settings: OptimizerSettings | Sequence[OptimizerSettings] | None, problems: list[str]
) -> tuple[OptimizerConfig, OptimizerSettings | Sequence[OptimizerSettings] | None]:
    """What a class of torch's does, as megacore's settings: a constant learning rate, and no clipping."""
    ways = "use torch.optim.AdamW, Adam or SGD, partial(torch.optim.AdamW, lr=1e-3), or OptimizerConfig(lr=1e-3)"
    if not callable(optimizer):
        why = "holds parameters that the engine does not train" if isinstance(optimizer, torch.optim.Optimizer) else ""
        problems.append(f"optimizer is of type {type(optimizer).__name__}{why and ', which ' + why}: {ways}")
        return OptimizerConfig(), settings
    if settings is not None:
        problems.append("optimizer_settings has no effect beside an optimizer of torch's: leave one of them out")
    try:
        made = optimizer([torch.nn.Parameter(torch.zeros(1, 1)), torch.nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        problems.append(f"optimizer {describe_call(optimizer)} cannot be made ({error}): {ways}")
        return OptimizerConfig(), None
    if not isinstance(made, torch.optim.Optimizer):
        problems.append(f"optimizer {describe_call(optimizer)} makes a {type(made).__name__}: {ways}")
        return OptimizerConfig(), None
    values = {"lr_decay_style": "constant", "clip_grad": 0.0, **of_torch(made, problems)}
    own = OPTIMIZERS[values.get("optimizer", "adamw")]

    def section(kind: type[S]) -> S:
        return kind(**{name: values[name] for name in field_infos(kind) if name in values})

    return section(OptimizerConfig), [section(own), *(section(OPTIMIZERS[name]) for name in own.shares)]


def _optimizer_of(
    optimizer: OptimizerConfig,
    given: OptimizerSettings | Sequence[OptimizerSettings] | None,
    problems: list[str],
) -> tuple[OptimizerConfig, dict[str, Any]]:
    """The optimizer's section with the name that its settings have, and the sections of the settings by name: of the
    first, and of those that it shares."""
    if given is None:
        return optimizer, {}
    settings, *others = [given] if isinstance(given, OptimizerSettings) else given
    shared = {name: other for name in settings.shares for other in others if type(other) is OPTIMIZERS[name]}
    problems += [
        f"optimizer_settings {type(other).__name__} has no effect beside {type(settings).__name__}: leave it out"
        for other in others
        if other not in shared.values()
    ]
    name = next((name for name, kind in OPTIMIZERS.items() if kind is type(settings)), None)
    if name is None:
        kinds = one_of([kind.__name__ for kind in OPTIMIZERS.values()])
        problems.append(
            f"optimizer_settings {type(settings).__name__} is of no registered optimizer: use {kinds}, or "
            "register yours (docs/extend/optimizer.md)"
        )
        return optimizer, {}
    if optimizer.optimizer not in (name, field_infos(OptimizerConfig)["optimizer"].default):
        problems.append(
            f"optimizer {optimizer.optimizer} and optimizer_settings {type(settings).__name__}, which is of {name}, "
            f"exclude each other: use {OPTIMIZERS[optimizer.optimizer].__name__}, or leave one of them out"
            if optimizer.optimizer in OPTIMIZERS
            else f"optimizer {optimizer.optimizer} is not known: use {one_of(list(OPTIMIZERS))}"
        )
    return dataclasses.replace(optimizer, optimizer=name), {name: settings, **shared}


# ---- what an optimizer of torch's does, in megacore's settings

_ADAM_KINDS = (torch.optim.Adam, torch.optim.AdamW)


def of_torch(optimizer: torch.optim.Optimizer, problems: list[str]) -> dict[str, Any]:
    """The fields that say what an optimizer of torch's does; `problems` receives what has no counterpart."""
    kind = type(optimizer).__name__
    groups: list[dict[str, Any]] = optimizer.param_groups
    decay = decays(groups, kind, problems)
    shared = {name: [group[name] for group in groups] for name in groups[0] if name not in ("params", "weight_decay")}
    for name, each in shared.items():
        if any(value != each[0] for value in each):
            problems.append(f"optimizer {kind}: its parameter groups differ in {name}: use one value for all")
    first = {name: each[0] for name, each in shared.items()}
    for name in ("amsgrad", "maximize", "dampening"):
        if first.get(name):
            problems.append(f"optimizer {kind}: {name} {first[name]} is not in megacore: leave it out")
    if isinstance(optimizer, _ADAM_KINDS):
        decoupled = isinstance(optimizer, torch.optim.AdamW) or first.get("decoupled_weight_decay", False)
        ours = "adamw" if decoupled or not decay["weight_decay"] else "adam"  # which are one without weight decay
        names = {"adam_beta1": first["betas"][0], "adam_beta2": first["betas"][1], "adam_eps": first["eps"]}
        return {"optimizer": ours, "lr": float(first["lr"]), **decay, **names}
    if isinstance(optimizer, torch.optim.SGD):
        names = {"sgd_momentum": first["momentum"], "sgd_nesterov": first["nesterov"]}
        return {"optimizer": "sgd", "lr": float(first["lr"]), **decay, **names}
    problems.append(f"optimizer {kind} is not in megacore: use AdamW or SGD, or write one (docs/extend/optimizer.md)")
    return {}


def decays(groups: Iterable[Mapping[str, Any]], what: str, problems: list[str]) -> dict[str, Any]:
    """The fields that decay matrices and vectors as groups of torch's do. `groups`: with the tensors `params`, and
    their `weight_decay`. `what`: has these groups, for messages. `problems`: receives what cannot be decayed alike."""
    of_matrices, of_vectors = set[float](), set[float]()
    for group in groups:
        for parameter in group["params"]:
            (of_matrices if parameter.dim() >= 2 else of_vectors).add(float(group.get("weight_decay", 0.0)))
    decay, of_vector = max(of_matrices, default=0.0), max(of_vectors, default=0.0)
    if len(of_matrices) > 1 or len(of_vectors) > 1 or (of_vector and not decay):
        problems.append(
            f"{what}: weight decay is {sorted(of_matrices)} for matrices and {sorted(of_vectors)} for vectors, but "
            "megacore decays all matrices alike, and all vectors alike if matrices decay too: give the matrices one "
            "value, and the vectors one value or 0"
        )
        return {"weight_decay": decay}
    rule = {"param_group": (f"*:vector-decay={of_vector / decay!r}",)} if of_vector else {}
    return {"weight_decay": decay, **rule}
