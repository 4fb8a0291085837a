"""The repository keeps the rules of the house, and the checker finds a violation of each that is planted for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import pytest

from tests.unit import architecture_exceptions as exceptions
from tests.unit import architecture_rules as rules
from tests.unit.architecture_rules import Source
from tests.unit.packaging_builds import ROOT

Rule = Callable[[Iterable[Source]], list[str]]

CUDA = ("x.cuda()", "torch.cuda.synchronize()", "torch.device('cuda')", "x.to('cuda:0')", "d = 'cuda'")
REPLACING = ("import fcntl", "import os\nos.replace(a, b)")
PICKLING = "np.load(p, allow_pickle=True)"
KERNEL = "from megacore.kernels import norm\n"


@pytest.fixture(scope="module")
def repository() -> list[Source]:
    """Every Python file of the repository, read and parsed once."""
    files = [*ROOT.glob("pretrain_*.py"), *(file for folder in rules.FOLDERS for file in (ROOT / folder).rglob("*.py"))]
    sources = [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in sorted(files)]
    # Of the millions of nodes none is garbage, and the collector would look at them again and again.
    gc.disable()
    try:
        assert all(source.nodes for source in sources)
    finally:
        gc.enable()
    return sources


def test_every_exception_is_still_needed(repository: list[Source]) -> None:
    texts = {source.path: source for source in repository}
    for path, module in exceptions.LATE_IMPORTS:
        assert any(item.late and item.module == module for item in texts[path].imports), (path, module)
    assert set(exceptions.DISTRIBUTED) | exceptions.TORCH_IN_DATA | set(exceptions.CUDA_NAMES) <= set(texts)
    assert set(texts) >= exceptions.KERNEL_USERS | exceptions.DEGREES_BY_NAME | set(exceptions.FILE_REPLACERS)


# Rule -> file and text of what it finds, each by itself.
FOUND: dict[Rule, list[tuple[str, str]]] = {
    rules.upward_imports: [
        ("megacore/layers/mlp", "from megacore.models.gpt import GPT"),
        ("megacore/data/gpt", "import megacore.optim.update"),  # sideways
        ("megacore/train/trainer", "from megacore.data.loading.loader import BatchLoader"),  # past the entry point
        ("megacore/config", "from megacore.parallel import mesh"),
        ("megacore/config", "from megacore import ops"),
        ("kernels/norm", "from megacore import config"),
        ("megacore/train/trainer", "from tools import generate"),
        ("megacore/train/trainer", "from benchmarks import workload"),
        ("tools/generate", "import benchmarks.workload"),
        ("megacore/train/trainer", "import pretrain_gpt"),
        ("megacore/train/trainer", "from . import metrics"),
        ("megacore/layers/mlp", "if TYPE_CHECKING:\n    from megacore.models.gpt import GPT"),
        ("megacore/layers/mlp", "def f():\n    from megacore.train import trainer"),
    ],
    rules.late_imports: [
        ("megacore/data/gpt", "def f():\n    import zstandard"),
        ("megacore/data/gpt", "try:\n    import zstandard\nexcept ImportError:\n    pass"),
        ("megacore/data/gpt", "if x:\n    import zstandard"),
        ("megacore/data/gpt", "class A:\n    def f(self):\n        import zstandard"),
    ],
    rules.stray_communication: [
        ("megacore/optim/update", "import torch.distributed as dist"),
        ("megacore/optim/update", "from torch import distributed"),
        ("megacore/optim/update", "import torch\ntorch.distributed.all_reduce(x)"),
        ("megacore/pipeline/transport", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("megacore/parallel/mesh", "import torch.distributed as dist\ndist.broadcast(x, 0)"),
        ("megacore/parallel/collectives", "import torch.distributed as dist\ndist.isend(x, 0)"),
    ],
    rules.cuda_by_name: [("megacore/layers/mlp", text) for text in CUDA],
    rules.replicas_by_name: [("megacore/train/metrics", "x = config.parallel.dp")],
    rules.stray_file_replacement: [("megacore/data/gpt", text) for text in REPLACING],
    rules.pickles: [
        ("megacore/data/gpt", text)
        for text in ("import pickle", "from pickle import loads", "torch.load(p)", "torch.save(x, p)", PICKLING)
    ],
    rules.stray_kernels: [("megacore/layers/norm", KERNEL)],
    rules.catch_alls: [("megacore/utils", '"""Doc."""')],
}
# And of what it leaves alone.
ALLOWED: dict[Rule, list[tuple[str, str]]] = {
    rules.upward_imports: [
        ("megacore/train/trainer", "from megacore.data import BatchLoader"),
        ("megacore/ops", "from megacore.kernels import availability"),
        ("megacore/data/gpt", "from megacore.data.indexed.reader import IndexedDataset"),
        ("megacore/cli", "from megacore import __version__"),
        ("pretrain_gpt", "from megacore.train.launch import launch"),
        ("tests/unit/test_x", "from megacore.train.launch import launch"),
    ],
    rules.late_imports: [
        ("megacore/drawing/canvas", "def f():\n    import matplotlib"),
        ("pretrain_gpt", "def f():\n    from megacore.train.launch import launch"),
        ("megacore/data/gpt", "if TYPE_CHECKING:\n    import zstandard"),
    ],
    rules.cuda_by_name: [("megacore/parallel/mesh", text) for text in CUDA],
    rules.replicas_by_name: [
        ("megacore/plan/search_space", "x = config.parallel.dp"),
        ("tests/unit/test_config", "x = config.parallel.dp"),
    ],
    rules.stray_file_replacement: [("megacore/files", text) for text in REPLACING],
    rules.pickles: [("megacore/data/gpt", "np.load(p, allow_pickle=False)")],
    rules.stray_kernels: [
        ("megacore/ops/norm", KERNEL),
        ("kernels/norm", KERNEL),
        ("megacore/cli", "from megacore.kernels.availability import triton_version"),
    ],
    rules.catch_alls: [("megacore/a", "")],
}


@pytest.mark.parametrize("rule", [*FOUND, rules.cycles, rules.early_torch], ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Rule, repository: list[Source]) -> None:
    assert len(repository) > 40
    violations = rule(repository)
    assert not violations, "\n".join(["", *violations])


@pytest.mark.parametrize("rule", FOUND, ids=lambda rule: rule.__name__)
def test_a_planted_violation_is_found_and_nothing_else(rule: Rule) -> None:
    for path, text in FOUND[rule]:
        assert rule([Source(f"{path}.py", text)]), text
    for path, text in ALLOWED.get(rule, []):
        assert rule([Source(f"{path}.py", text)]) == [], text


def test_a_cycle_is_found_even_when_a_function_hides_it() -> None:
    sources = [
        Source("megacore/data/a.py", "from megacore.data.b import x"),
        Source("megacore/data/b.py", "from megacore.data import c"),
        Source("megacore/data/c.py", "def f():\n    from megacore.data.a import y"),
        Source("megacore/data/d.py", "from megacore.data.a import y"),
    ]
    assert rules.cycles(sources) == ["megacore.data.a -> megacore.data.b -> megacore.data.c -> megacore.data.a"]
    assert rules.cycles(sources[:2] + sources[3:]) == []


def test_torch_behind_the_configuration_is_found() -> None:
    sources = [
        Source("megacore/config/cli.py", "from megacore.data import build"),
        Source("megacore/data/build.py", "from megacore.data.gpt import GPTDataset"),
        Source("megacore/data/gpt.py", "import numpy\nimport torch"),
        Source("megacore/data/loading/loader.py", "import torch"),
        Source("megacore/data/clean.py", "import numpy\ndef f():\n    import torch"),
        Source("pretrain_gpt.py", "from megacore.data.clean import f\nfrom megacore.data import build"),
    ]
    loading = ("megacore/config/cli", "megacore/data/build", "megacore/data/gpt", "pretrain_gpt")
    assert rules.early_torch(sources) == [f"{name}.py loads torch, through megacore/data/gpt.py" for name in loading]
