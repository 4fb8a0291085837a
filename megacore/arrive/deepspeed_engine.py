"""`megacore.initialize`: the API of DeepSpeed for any model, on megacore's engine.

    engine, optimizer, loader, scheduler = megacore.initialize(model=net, config="ds_config.json")
    for x, y in batches:
        loss = F.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()

A `torch.nn.Module` is trained data-parallel: the program runs its forward and computes its loss. A list of `Layer` is
trained in a pipeline too, by `train_batch`. docs/guides/any-model.md is the manual.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from megacore.arrive.deepspeed_settings import EngineSettings, check_parameters, engine_settings
from megacore.config.fields import LARGEST_INT
from megacore.config.nodes import launcher_number
from megacore.errors import ConfigError, UserError
from megacore.files import read_bounded, replace_bytes
from megacore.models.plain import take_values_of_first_rank
from megacore.optim.lr_schedules import learning_rate
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.mesh import build_mesh
from megacore.remote import is_url
from megacore.train.engine import Layer, PipelineEngine
from megacore.train.plain_task import LossFunction
from megacore.train.step import StepResult

__all__ = ["Engine", "EngineOptimizer", "Schedule", "initialize"]

_MOST_STATE = 1 << 24
_NAME = "module"
_LAST_TAG = "latest_tag"  # file in the directory of checkpoints: the tag of the last one; empty: none


def initialize(
    args: Any = None,
    model: nn.Module | Sequence[Layer] | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    config_params: Mapping[str, Any] | None = None,
    *,
    loss: LossFunction | None = None,
    output_dir: str | Path = "output",
    **engine: Any,
) -> tuple[Engine, EngineOptimizer, DataLoader[Any] | None, Any]:
    """An engine for a model, from a DeepSpeed configuration; all ranks call this together. The process group is made
    where there is none. The arguments are those of `deepspeed.initialize`.

    Args:
        args: whose `deepspeed_config` is the configuration, where `config` is not given.
        model: a module, whose values on rank 0 all ranks start from; or the layers of a pipeline.
        optimizer: AdamW, Adam or SGD of torch's, or a function that makes one of the parameters; None: that of the
            configuration, AdamW where it has none.
        model_parameters: all that the model trains; None: them.
        training_data: a dataset, for a data loader with this replica's samples.
        lr_scheduler: of torch's, or a function that makes one of the returned optimizer; None: that of the
            configuration. `step` steps it.
        mpu: None, because the configuration has the degrees.
        config: a JSON file, or what one contains; `config_params` is an older name.
        loss: (output, targets) -> a scalar mean, for `train_batch` and `eval_batch`; None: a module's output is its
            loss.
        output_dir: of metrics.csv, the profile and W&B's files.
        engine: further arguments of `PipelineEngine`, such as `seed`, `watch` and `callbacks`.

    Returns:
        The engine, its optimizer, the data loader and the scheduler; the last two are None where there are none.

    Raises:
        ConfigError: everything in the configuration that has no counterpart.
    """
    source = next((one for one in (config, config_params, getattr(args, "deepspeed_config", None)) if one), None)
    problems = [] if source is not None else ["config is missing: give a DeepSpeed configuration, a file or a dict"]
    if model is None:
        problems.append("model is missing: give a torch.nn.Module, or a list of megacore's Layer")
    if mpu is not None:
        problems.append("mpu is given: leave it out, and give the degrees in the configuration or to `parallel`")
    if problems:
        raise ConfigError(problems)
    assert source is not None
    assert model is not None
    if isinstance(model, nn.Module) and model_parameters is not None:
        check_parameters(model_parameters, model)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        taken = model_parameters or (model.parameters() if isinstance(model, nn.Module) else None)
        optimizer = optimizer(taken)
    made = Engine(
        model,
        engine_settings(source, optimizer, model),
        loss=loss,
        output_dir=output_dir,
        lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
        **engine,
    )
    return made, made.optimizer, made.training_dataloader, made.lr_scheduler


class Engine:
    """Trains a model with the methods of DeepSpeed's engine; `initialize` makes it."""

    def __init__(
        self,
        model: nn.Module | Sequence[Layer],
        settings: EngineSettings,
        *,
        loss: LossFunction | None,
        output_dir: str | Path,
        lr_scheduler: Any,
        training_data: Dataset[Any] | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        **engine: Any,
    ) -> None:
        self._settings, self._loss = settings, loss
        self._is_module = isinstance(model, nn.Module)
        mesh = engine.pop("mesh", None)
        layers = model
        if isinstance(model, nn.Module):
            _require_plain(settings)
            mesh = mesh or build_mesh(settings.parallel)
            take_values_of_first_rank(model, mesh)
            layers = [Layer(_NAME, partial(_same, model))]
        elif loss is None:
            raise ConfigError(["loss is missing: layers of a pipeline need one, as in loss=F.cross_entropy"])
        self.pipeline = PipelineEngine(
            layers,
            loss=loss or F.mse_loss,
            # The program decides when it ends.
            train_iters=LARGEST_INT,
            num_microbatches=settings.accumulation,
            parallel=settings.parallel,
            optimizer=settings.optimizer,
            optimizer_settings=settings.optimizer_settings,
            precision=settings.precision,
            recompute=settings.recompute,
            compile=settings.compile,
            logging=settings.logging,
            output_dir=output_dir,
            mesh=mesh,
            **engine,
        )
        self.module = model if isinstance(model, nn.Module) else self.pipeline.model.chunks[0]
        self.mesh, self.device = self.pipeline.mesh, self.pipeline.mesh.device
        self.micro_steps = 0  # microbatches whose backward has run
        self._pending = 0  # microbatches of the step that has begun
        self.last_result: StepResult | None = None
        self.optimizer = EngineOptimizer(self, settings.optimizer.lr)  # whose `param_groups` show the learning rate
        self.lr_scheduler = lr_scheduler  # that of the caller, a `Schedule` of the configuration, or None
        if callable(lr_scheduler) and not hasattr(lr_scheduler, "get_last_lr"):
            self.lr_scheduler = lr_scheduler(self.optimizer)
        elif lr_scheduler is None and settings.scheduled:
            self.lr_scheduler = Schedule(self)
        if lr_scheduler is not None and settings.scheduled:
            raise ConfigError(["lr_scheduler is given, and the configuration has a scheduler: keep one of them"])
        self._set_rate()
        # Of the training data, or None.
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data, collate_fn)
        self._samples: Iterator[Any] | None = None
        if self.mesh.world.is_first:
            for note in settings.notes:
                print(f"megacore: note: {note}", file=sys.stderr)

    # ---- a module: forward, backward, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output. Inputs in fp32 are converted to the format of the parameters."""
        self._require_module("forward")
        steps, data_parallel = self.pipeline.train_steps, self.pipeline.model.data_parallel
        readers = self.mesh.batch
        # Dropout masks follow the microbatch's number in the run, whatever the layout.
        steps.task.streams.microbatch = self.micro_steps * readers.size + readers.rank
        convert = self.pipeline.task.in_training_format
        data_parallel.gather_parameters(0)
        try:
            return self.module(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})
        finally:
            data_parallel.release_parameters(0)

    def backward(self, loss: Tensor) -> Tensor:
        """Backward of a microbatch's mean loss, which is returned. The step's gradient is the mean over its
        microbatches and replicas. Raises UserError where it is no scalar, or the step is complete and `step` was not
        called."""
        self._require_module("backward")
        if not isinstance(loss, Tensor) or loss.dim():
            raise UserError("backward takes the loss of a microbatch, a scalar tensor")
        accumulation = self._settings.accumulation
        if self._pending == accumulation:
            raise UserError(
                f"backward is called for microbatch {accumulation + 1} of a step of {accumulation}: call step() after "
                "every backward, or use other gradient_accumulation_steps"
            )
        steps = self.pipeline.train_steps
        if self._pending == 0:
            steps.begin(torch.full((), float(accumulation), dtype=torch.float64, device=self.device))
        self._pending += 1
        self.micro_steps += 1
        steps.backward(loss, is_last=self._pending == accumulation)
        return loss

    def step(self) -> None:
        """Update the weights after the last microbatch of a step; after the others it does nothing."""
        self._require_module("step")
        if self._pending == self._settings.accumulation:
            self._pending = 0
            self._use_rate()
            self._finish(self.pipeline.update_weights())

    def _finish(self, result: StepResult) -> None:
        self.last_result = result
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch's schedulers warn that it was not
        # As in DeepSpeed, a step that is skipped does not advance the schedule.
        if result.skipped is None and self.lr_scheduler is not None and not isinstance(self.lr_scheduler, Schedule):
            self.lr_scheduler.step()
        self._set_rate()
        self._log(result.loss)

    def _set_rate(self) -> None:
        if isinstance(self.lr_scheduler, Schedule):
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr_scheduler.get_last_lr()[0]

    def _use_rate(self) -> None:
        """Let the next step have the learning rate that the optimizer shows, which the program may have set."""
        self.pipeline.train_steps.rate = float(self.optimizer.param_groups[0]["lr"])

    def _log(self, loss: Tensor) -> None:
        run, logging, every = self.pipeline, self._settings.logging, self._settings.log_interval
        if logging.csv or logging.tensorboard_dir or logging.wandb_project:
            run.log({"train/loss": float(loss), "train/lr": run.lr, "train/grad_norm": float(run.grad_norm)})
        if every is not None and run.step % every == 0 and self.mesh.world.is_first:
            print(f"step {run.step} loss {float(loss):.6g} lr {run.lr:.4g}", flush=True)

    # ---- whole batches

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """A whole step, of gradient_accumulation_steps microbatches. `data_iter`: gives (inputs, targets) of each;
        None: the training data, again and again. Returns the mean loss over the global batch."""
        batches = list(itertools.islice(self._data(data_iter), self._settings.accumulation))
        if len(batches) < self._settings.accumulation:
            raise UserError(
                f"train_batch got {len(batches)} microbatches of {self._settings.accumulation}: data_iter has ended"
            )
        if not self._is_module:
            self._use_rate()
            loss = self.pipeline.train_batch(batches)
            self.micro_steps += len(batches)
            self._set_rate()
            self._log(loss)
            return loss
        self.module.train()
        for batch in batches:
            self.backward(self._loss_of(batch))
            self.step()
        assert self.last_result is not None
        return self.last_result.loss

    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """The mean loss over gradient_accumulation_steps microbatches of every replica, in evaluation mode."""
        batches = list(itertools.islice(data_iter, self._settings.accumulation))
        if not self._is_module:
            return torch.tensor(self.pipeline.evaluate(batches), dtype=torch.float64)
        was_training = self.module.training
        self.module.eval()
        with torch.no_grad():
            losses = [self._loss_of(batch).double() for batch in batches]
        self.module.train(was_training)
        sums = torch.stack([torch.stack(losses).sum(), torch.full_like(losses[0], len(losses))])
        total, count = all_reduce_(sums, self.mesh.batch)
        return total / count

    def _data(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            return data_iter
        if self.training_dataloader is None:
            raise UserError("train_batch needs data: give data_iter, or training_data to initialize")
        if self._samples is None:
            self._samples = _again_and_again(self.training_dataloader)
        return self._samples

    def _loss_of(self, batch: Any) -> Any:
        inputs, targets = batch if self._loss is not None else (batch, None)
        taken = inputs if isinstance(inputs, tuple | list) else (inputs,)
        output = self(*(value.to(self.device) if isinstance(value, Tensor) else value for value in taken))
        if self._loss is None:
            return output
        targets = targets.to(self.device) if isinstance(targets, Tensor) else targets
        return self._loss(output.float() if isinstance(output, Tensor) else output, targets)

    def deepspeed_io(
        self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> DataLoader[Any]:
        """A data loader with this replica's samples, in microbatches."""
        readers = self.mesh.batch
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=readers.size, rank=readers.rank)
        return DataLoader(
            dataset,
            batch_size=self._settings.micro_batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=self._settings.drop_last,
        )

    # ---- checkpoints

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> bool:
        """Publish a checkpoint of megacore's, step_NNNNNNNN of `save_dir`, or of its directory `tag`; all ranks call
        this together. `load_checkpoint` without a tag takes the one that was saved last. `client_state`: what JSON can
        hold. Raises UserError where the directory is a URL."""
        path = Path(str(self.pipeline.save(_local(save_dir) / (tag or ""))))
        if self.mesh.world.is_first:
            state = {"micro_steps": self.micro_steps, "client_state": dict(client_state or {})}
            if self.lr_scheduler is not None and not isinstance(self.lr_scheduler, Schedule):
                state["lr_scheduler"] = self.lr_scheduler.state_dict()
            replace_bytes(_beside(path), json.dumps(state).encode())
            replace_bytes(_local(save_dir) / _LAST_TAG, (tag or "").encode())
        return True

    def load_checkpoint(self, load_dir: str | Path, tag: str | None = None) -> tuple[str | None, dict[str, Any]]:
        """Continue from a checkpoint of any layout; all ranks call this together. `tag`: None: that of the last
        `save_checkpoint`. Returns the checkpoint's directory and the client's state; (None, {}) where there is no such
        directory."""
        last = _local(load_dir) / _LAST_TAG
        if tag is None and last.is_file():
            tag = read_bounded(last, _MOST_STATE).decode()
        directory = _local(load_dir) / (tag or "")
        if not directory.is_dir():
            if self.mesh.world.is_first:
                print(f"megacore: note: {directory} does not exist: nothing is loaded", file=sys.stderr)
            return None, {}
        self.pipeline.load(directory)
        found = [path for path in sorted(directory.glob(f"step_{self.pipeline.step:08d}*")) if path.is_dir()]
        path = found[-1] if found else directory
        state: dict[str, Any] = {}
        if _beside(path).is_file():
            state = json.loads(read_bounded(_beside(path), _MOST_STATE))
        self.micro_steps = state.get("micro_steps", self.pipeline.step * self._settings.accumulation)
        if "lr_scheduler" in state and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
        self._pending = 0
        self._set_rate()
        return str(path), state.get("client_state", {})

    def module_state_dict(self) -> dict[str, Tensor]:
        """Every weight and buffer, whole and on the CPU, by the model's own names; all ranks call this together."""
        prefix = f"{_NAME}." if self._is_module else ""
        return {name.removeprefix(prefix): value for name, value in self.pipeline.state_dict().items()}

    def load_module_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take weights and buffers from what `module_state_dict` returned."""
        prefix = f"{_NAME}." if self._is_module else ""
        self.pipeline.load_state_dict({f"{prefix}{name}": value for name, value in state.items()})

    # ---- what programs ask

    def train(self, mode: bool = True) -> Engine:
        """Training mode of the model; of a pipeline, `train_batch` and `eval_batch` set it."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Evaluation mode of the model."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Nothing: every step drops the gradients of the one before."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next backward is the last of a step; after it, until `step`, whether it was."""
        return self._pending in (self._settings.accumulation - 1, self._settings.accumulation)

    def gradient_accumulation_steps(self) -> int:
        """Microbatches of a step on each replica."""
        return self._settings.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._settings.micro_batch_size

    def train_batch_size(self) -> int:
        """Samples of a step on all replicas."""
        return self._settings.micro_batch_size * self._settings.accumulation * self.mesh.batch.size

    def get_lr(self) -> list[float]:
        """Of the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float:
        """Of the last step, before clipping."""
        return float(self.pipeline.grad_norm)

    @property
    def global_steps(self) -> int:
        return self.pipeline.step

    def zero_optimization_stage(self) -> int:
        return self._settings.parallel.zero_stage

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the model that this rank holds."""
        return self.module.parameters()

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return launcher_number("LOCAL_RANK", 0)

    @property
    def global_rank(self) -> int:
        return self.mesh.world.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world.size

    def close(self) -> None:
        """Close the trackers, wait for all ranks and leave the job; the last thing to do."""
        self.pipeline.close()

    def _require_module(self, method: str) -> None:
        if not self._is_module:
            raise UserError(f"{method} is not for the layers of a pipeline: use train_batch and eval_batch")


# ---- what `initialize` gives a program beside its engine, which does the work ----------------------------------------


class EngineOptimizer(torch.optim.Optimizer):
    """Stands for the engine's optimizer: its learning rate is that of the next step, and may be set."""

    def __init__(self, engine: Engine, lr: float) -> None:
        config = engine.pipeline.config.optimizer
        parameters = [p for p in engine.pipeline.model.parameters.values() if p.requires_grad]
        super().__init__(parameters, {"lr": lr, "weight_decay": config.weight_decay})
        self._engine = engine

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not for programs: engine.step() updates the weights. Raises UserError always."""
        raise UserError("optimizer.step() is called: call engine.step(), which clips gradients and updates the weights")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: every step of the engine drops the gradients of the one before."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: `engine.save_checkpoint` saves the state of the optimizer."""
        return {}


class Schedule:
    """The schedule of the configuration, as programs look at it; `engine.step` moves it on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def get_last_lr(self) -> list[float]:
        """The learning rate of the next step."""
        step, config = self._engine.global_steps + 1, self._engine.pipeline.config.optimizer
        return [learning_rate(step, config, train_iters=LARGEST_INT)]

    def get_lr(self) -> list[float]:
        return self.get_last_lr()

    def step(self) -> None:
        """Not for programs. Raises UserError always."""
        raise UserError("scheduler.step() is called: leave it out, because engine.step() moves the schedule on")

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the schedule is a function of the engine's step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


# ---- checks, data and files ------------------------------------------------------------------------------------------


def _require_plain(settings: EngineSettings) -> None:
    parallel, problems = settings.parallel, list[str]()
    for name, value in (("tp", parallel.tp), ("pp", parallel.pp), ("cp", parallel.cp)):
        if value > 1:
            problems.append(
                f"{name} {value} needs to know the layers of the model: give a list of megacore's Layer "
                "(docs/guides/any-model.md), or leave it out"
            )
    if settings.recompute != "none":
        problems.append("recompute full is for a list of Layer: use torch.utils.checkpoint in the model")
    if problems:
        raise ConfigError(problems)


def _same(model: nn.Module) -> nn.Module:
    return model


def _again_and_again(loader: DataLoader[Any]) -> Iterator[Any]:
    for epoch in itertools.count():
        if isinstance(loader.sampler, DistributedSampler):
            # Else torch's sampler gives every epoch the same order.
            loader.sampler.set_epoch(epoch)
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise UserError("training_data has no batch for this replica: use a smaller micro batch, or more data")


def _local(directory: str | Path) -> Path:
    """A directory of checkpoints: the client's state lies beside them, which only a path can have."""
    if is_url(str(directory)):
        raise UserError(f"{directory} is a URL: give a directory, or use PipelineEngine.save, which takes URLs")
    return Path(directory)


def _beside(checkpoint: Path) -> Path:
    """The file with the client's state, beside a checkpoint: the checkpoint itself holds only what its manifest
    lists."""
    return checkpoint.with_name(f"{checkpoint.name}.client.json")
