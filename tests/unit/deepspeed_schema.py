"""Prints every key of the configuration of the DeepSpeed that is installed, as JSON. To be run where one is:

    DS_ACCELERATOR=cpu python tests/unit/deepspeed_schema.py > tests/unit/deepspeed_keys.json

Sections that are pydantic classes are walked. The others are functions that read a dictionary: they read one here that
takes down what it is asked for.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from typing import Any, get_args

# Sections whose keys are free, or have a meaning only together: one key each.
_FREE = (
    *("data_efficiency.data_sampling", "data_efficiency.data_routing", "weight_quantization", "datastates_ckpt"),
    *("zero_optimization.zenflow", "autotuning.model_info"),
)
# Keys that are read in the middle of other code.
_WRITTEN_OUT = (
    *("weight_quantization", "vocabulary_size", "sequence_parallel_size", "allgather_size"),
    *("seq_parallel_communication_data_type", "pipeline.use_reentrant"),
)


_OF_OPTIMIZERS = ("torch_adam", "fp32_optimizer_states", "muon_lr", "adam_lr")


_OF_CHECKPOINT = ("get_checkpoint_tag_validation_mode", "get_checkpoint_parallel_write_pipeline")


class Asked(dict[str, Any]):
    """A dictionary that seems to have every section, and takes down the keys that it is asked for."""

    def __init__(self, path: str, found: set[str], without: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.path, self.found, self.without = path, found, without

    def _note(self, key: str) -> str:
        path = f"{self.path}.{key}" if self.path else key
        self.found.add(path)
        return path

    def __contains__(self, key: object) -> bool:
        path = self._note(str(key))
        return path not in self.without

    def __getitem__(self, key: str) -> Any:
        return Asked(self._note(key), self.found, self.without)

    def get(self, key: str, default: Any = None) -> Any:
        path = self._note(key)
        is_section = default == {} or key in ("checkpoint", "writer")
        return Asked(path, self.found, self.without) if is_section else default

    def __bool__(self) -> bool:
        return True

    def __int__(self) -> int:
        return 0

    def keys(self) -> Any:  # `name in config.keys()`
        return self

    def items(self) -> Any:
        return ()

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __copy__(self) -> Asked:
        return self


def fields_of(model: Any, prefix: str) -> Iterator[str]:
    """The keys of a pydantic class, under their names and aliases."""
    from pydantic import BaseModel

    for name, info in model.model_fields.items():
        inner = next(
            (
                kind
                for kind in (info.annotation, *get_args(info.annotation))
                if isinstance(kind, type) and issubclass(kind, BaseModel)
            ),
            None,
        )
        for word in {name, info.alias or name}:
            if inner is None:
                yield f"{prefix}{word}"
            else:
                yield from fields_of(inner, f"{prefix}{word}.")


_NO_KEYS = ("params", "maximize", "differentiable", "deepspeed")


def all_keys() -> list[str]:
    """Every key, in order."""
    import torch
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.runtime import config, lr_schedules
    from deepspeed.runtime.fp16.onebit.adam import OnebitAdam
    from deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuon
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    removed = {*config._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    removed |= {f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS}
    models = {
        "zero_optimization.": DeepSpeedZeroConfig,
        "fp16.": DeepSpeedFP16Config,
        "bf16.": DeepSpeedBF16Config,
        "": DeepSpeedMonitorConfig,
        "comms_logger.": CommsLoggerConfig,
        "compile.": CompileConfig,
        "tensor_parallel.": TPTrainingConfig,
        "timers.throughput.": DeepSpeedThroughputTimerConfig,
        "hybrid_engine.": config.HybridEngineConfig,
    }
    keys = {key for prefix, model in models.items() for key in fields_of(model, prefix)}
    keys |= {f"expert_parallel.{name}" for name in AutoEPConfig.__dataclass_fields__}
    asked: set[str] = set()
    readers: list[Any] = [
        reader for name, reader in inspect.getmembers(config, inspect.isfunction) if name.startswith("get_")
    ]
    readers += [reader for name, reader in inspect.getmembers(config, inspect.isclass) if name.startswith("DeepSpeed")]
    for reader in readers:
        section = "checkpoint" if reader.__name__ in _OF_CHECKPOINT else ""
        with contextlib.suppress(Exception):  # what it makes of such answers does not matter
            reader(Asked(section, asked, frozenset(removed)))
    written = inspect.getsource(config.DeepSpeedConfig)
    for section, variable in (("data_types", "data_types_params"), ("checkpoint", "checkpoint_params")):
        names = [line.split(f"{variable}.get(")[1] for line in written.splitlines() if f"{variable}.get(" in line]
        asked |= {f"{section}.{getattr(config, name.split(',')[0].strip())}" for name in names}
    pipeline = inspect.getsource(config.get_pipeline_config)
    asked |= {f"pipeline.{name}" for name in re.findall(r'^ +"(\w+)":', pipeline, re.MULTILINE)}
    for kind in (getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES):
        taken = list(inspect.signature(kind).parameters)
        keys |= {f"scheduler.params.{name}" for name in taken if name != "optimizer"}
    ours = (FusedAdam, FusedLamb, SingleDeviceMuon, OnebitAdam, OnebitLamb)
    for kind in (*ours, torch.optim.AdamW, torch.optim.SGD):
        taken = list(inspect.signature(kind).parameters)
        keys |= {f"optimizer.params.{name}" for name in taken if name not in _NO_KEYS}
    keys |= asked | removed | {*_WRITTEN_OUT, *(f"optimizer.params.{name}" for name in _OF_OPTIMIZERS)}
    free = tuple(f"{name}." for name in _FREE)
    keys = {key for key in keys if not key.rpartition(".")[2].startswith("_")}
    sections = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    return sorted({key for key in keys if not key.startswith(free)} - sections | {*_FREE})


if __name__ == "__main__":
    json.dump(all_keys(), sys.stdout, indent=1)
    print()
