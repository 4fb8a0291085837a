"""docs/reference/metrics.md names every metric that a run writes, and no other; bert.md has nothing that it lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from megacore.parallel.mesh import Mesh
from tests.parity.bert_runs import make_bert_config, make_bert_trainer
from tests.parity.runs import make_config, make_trainer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
SHORT: dict[str, Any] = {"train_iters": 1, "eval_interval": 1, "eval_iters": 1, "num_layers": 1}


def documented() -> set[str]:
    section = PAGE.read_text(encoding="utf-8").partition("## Names and units")[2].partition("\n## ")[0]
    return {"key"} ^ set(re.findall(r"^\| ([a-z_]+(?:/[a-z_N]+){0,2}) \|", section, re.MULTILINE))


def written(directory: Path) -> set[str]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return {re.sub(r"/block_\d+/", "/block_N/", key) for line in lines for key in json.loads(line)}


def test_every_metric_is_documented_and_every_documented_one_written(tmp_path: Path) -> None:
    mesh = Mesh(device=torch.device("cpu"))
    guards = {"on_spike": "rollback", "save_interval": 1, "clip_grad_adaptive": True, "gradient_noise_interval": 1}
    gpt = make_config((1, 1, 1), tmp_path / "gpt", precision="fp16", peak_tflops=1.0, **guards, **SHORT)
    make_trainer(gpt, mesh).run()
    make_bert_trainer(make_bert_config((1, 1, 1), tmp_path / "bert", **SHORT), mesh).run()
    experts = {"num_experts": 2, "moe_router_topk": 2, "disable_bias_linear": True, "activation": "swiglu"}
    experts["moe_expert_capacity_factor"] = 1.0
    make_trainer(make_config((1, 1, 1), tmp_path / "experts", **experts, **SHORT), mesh).run()
    of_several_ranks = {"watch/replicas_checked_step"}  # tests/parallel/test_replicas.py reads it
    found = set.union(*(written(tmp_path / model) for model in ("gpt", "bert", "experts")))
    assert found | of_several_ranks == documented()
