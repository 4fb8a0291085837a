"""The repository keeps the rules of the house, and the checker finds a violation of each that is planted for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.unit import architecture_exceptions as exceptions
from tests.unit import architecture_rules as rules
from tests.unit.architecture_rules import Source
from tests.unit.packaging_builds import ROOT

RULES = (
    rules.upward_imports,
    rules.cycles,
    rules.late_imports,
    rules.early_torch,
    rules.stray_communication,
    rules.cuda_by_name,
    rules.replicas_by_name,
    rules.stray_file_replacement,
    rules.pickles,
    rules.stray_kernels,
    rules.undocumented,
)
Rule = Callable[[Iterable[Source]], list[str]]


@pytest.fixture(scope="module")
def repository() -> list[Source]:
    """Every Python file of the repository."""
    files = [*ROOT.glob("pretrain_*.py"), *(file for folder in rules.FOLDERS for file in (ROOT / folder).rglob("*.py"))]
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in sorted(files)]


def planted(**files: str) -> list[Source]:
    """Sources from keyword arguments: `megacore__data__gpt` is megacore/data/gpt.py."""
    return [Source(name.replace("__", "/") + ".py", text) for name, text in files.items()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Rule, repository: list[Source]) -> None:
    assert len(repository) > 40
    violations = rule(repository)
    assert not violations, "\n".join(["", *violations])


def test_every_exception_is_still_needed(repository: list[Source]) -> None:
    texts = {source.path: source for source in repository}
    for path, module in exceptions.LATE_IMPORTS:
        assert any(item.late and item.module == module for item in texts[path].imports), (path, module)
    assert set(exceptions.DISTRIBUTED) | exceptions.TORCH_IN_DATA | set(exceptions.CUDA_NAMES) <= set(texts)
    assert set(texts) >= exceptions.KERNEL_USERS | exceptions.DEGREES_BY_NAME | set(exceptions.FILE_REPLACERS)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("megacore__layers__mlp", "from megacore.models.gpt import GPT"),
        ("megacore__data__gpt", "import megacore.optim.update"),  # sideways
        ("megacore__config", "from megacore.parallel import mesh"),
        ("megacore__config", "from megacore import ops"),
        ("kernels__norm", "from megacore import config"),
        ("megacore__train__trainer", "from tools import generate"),
        ("megacore__train__trainer", "from benchmarks import workload"),
        ("tools__generate", "import benchmarks.workload"),
        ("megacore__train__trainer", "import pretrain_gpt"),
        ("megacore__train__trainer", "from . import metrics"),
        ("megacore__layers__mlp", "if TYPE_CHECKING:\n    from megacore.models.gpt import GPT"),
        ("megacore__layers__mlp", "def f():\n    from megacore.train import trainer"),
    ],
)
def test_an_import_upwards_or_sideways_is_found(path: str, line: str) -> None:
    assert len(rules.upward_imports(planted(**{path: line}))) >= 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("megacore__train__trainer", "from megacore.data.loading.loader import BatchLoader"),
        ("megacore__ops", "from megacore.kernels import availability"),
        ("megacore__data__gpt", "from megacore.data.indexed.reader import IndexedDataset"),
        ("megacore__cli", "from megacore import __version__"),
        ("pretrain_gpt", "from megacore.train.launch import launch"),
        ("tests__unit__test_x", "from megacore.train.launch import launch"),
    ],
)
def test_an_import_downwards_is_not(path: str, line: str) -> None:
    assert rules.upward_imports(planted(**{path: line})) == []


def test_a_cycle_is_found_even_when_a_function_hides_it() -> None:
    sources = planted(
        megacore__data__a="from megacore.data.b import x",
        megacore__data__b="from megacore.data import c",
        megacore__data__c="def f():\n    from megacore.data.a import y",
        megacore__data__d="from megacore.data.a import y",
    )
    assert rules.cycles(sources) == ["megacore.data.a -> megacore.data.b -> megacore.data.c -> megacore.data.a"]
    assert rules.cycles(sources[:2] + sources[3:]) == []


@pytest.mark.parametrize(
    "head", ["def f():\n    ", "try:\n    ", "if x:\n    ", "class A:\n    def f(self):\n        "]
)
def test_a_late_import_is_found_unless_it_is_listed(head: str) -> None:
    tail = "\nexcept ImportError:\n    pass" if head.startswith("try") else ""
    assert rules.late_imports(planted(megacore__data__gpt=f"{head}import zstandard{tail}"))
    assert not rules.late_imports(planted(megacore__plan__canvas=f"{head}import matplotlib{tail}"))
    assert not rules.late_imports(planted(pretrain_gpt=f"{head}from megacore.train.launch import launch{tail}"))
    assert not rules.late_imports(planted(megacore__data__gpt="if TYPE_CHECKING:\n    import zstandard"))


def test_torch_behind_the_configuration_is_found() -> None:
    sources = planted(
        megacore__config__cli="from megacore.data import build",
        megacore__data__build="from megacore.data.gpt import GPTDataset",
        megacore__data__gpt="import numpy\nimport torch",
        megacore__data__loading__loader="import torch",
        megacore__data__clean="import numpy\ndef f():\n    import torch",
        pretrain_gpt="from megacore.data.clean import f\nfrom megacore.data import build",
    )
    assert rules.early_torch(sources) == [
        "megacore/config/cli.py loads torch, through megacore/data/gpt.py",
        "megacore/data/build.py loads torch, through megacore/data/gpt.py",
        "megacore/data/gpt.py loads torch, through megacore/data/gpt.py",
        "pretrain_gpt.py loads torch, through megacore/data/gpt.py",
    ]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("megacore__optim__update", "import torch.distributed as dist"),
        ("megacore__optim__update", "from torch import distributed"),
        ("megacore__optim__update", "import torch\ntorch.distributed.all_reduce(x)"),
        ("megacore__pipeline__transport", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("megacore__parallel__mesh", "import torch.distributed as dist\ndist.broadcast(x, 0)"),
        ("megacore__parallel__collectives", "import torch.distributed as dist\ndist.isend(x, 0)"),
    ],
)
def test_communication_outside_its_file_is_found(path: str, text: str) -> None:
    assert len(rules.stray_communication(planted(**{path: text}))) >= 1


@pytest.mark.parametrize(
    "text", ["x.cuda()", "torch.cuda.synchronize()", "torch.device('cuda')", "x.to('cuda:0')", "d = 'cuda'"]
)
def test_cuda_by_name_is_found_outside_the_seam(text: str) -> None:
    assert len(rules.cuda_by_name(planted(megacore__layers__mlp=text))) == 1
    assert rules.cuda_by_name(planted(megacore__parallel__mesh=text)) == []


@pytest.mark.parametrize("text", ["import fcntl", "import os\nos.replace(a, b)"])
def test_a_lock_or_an_atomic_write_elsewhere_is_found(text: str) -> None:
    assert len(rules.stray_file_replacement(planted(megacore__data__gpt=text, megacore__files=text))) == 1


def test_a_number_of_replicas_by_name_is_found() -> None:
    text = "x = config.parallel.dp"
    sources = planted(megacore__train__metrics=text, megacore__plan__search_space=text, tests__unit__test_config=text)
    assert [line.split()[0] for line in rules.replicas_by_name(sources)] == ["megacore/train/metrics.py:1"]


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from pickle import loads", "torch.load(p)", "torch.save(x, p)", "np.load(p, allow_pickle=True)"],
)
def test_a_pickle_is_found(text: str) -> None:
    assert len(rules.pickles(planted(megacore__data__gpt=text))) == 1
    assert rules.pickles(planted(megacore__data__gpt="np.load(p, allow_pickle=False)")) == []


def test_what_is_too_large_is_found() -> None:
    function = "def f():\n" + "    x = 1\n" * 60
    parameters = "def f(self, a, b, c, d, e): ...\ndef g(a, b, c, d, e, g): ...\ndef h(a, b, c, d, e, *, g): ..."
    assert len(rules.oversized(planted(megacore__a="x = 1\n" * 351))) == 1
    assert rules.oversized(planted(megacore__a="x = 1\n" * 350)) == []
    assert len(rules.oversized(planted(pretrain_gpt="x = 1\n" * 100))) == 1
    assert rules.oversized(planted(megacore__a=function)) == ["megacore/a.py:1 f has 61 lines (limit 60)"]
    assert rules.oversized(planted(megacore__a=parameters)) == ["megacore/a.py:2 g takes 6 positional parameters"]
    assert rules.oversized(planted(kernels__a="@triton.jit\ndef _k(a, b, c, d, e, f):\n    pass\n")) == []


def test_a_kernel_is_imported_by_operators_alone() -> None:
    line = "from megacore.kernels import norm\n"
    assert len(rules.stray_kernels(planted(megacore__layers__norm=line))) == 1
    assert rules.stray_kernels(planted(megacore__ops__norm=line, kernels__norm=line)) == []
    assert rules.stray_kernels(planted(megacore__cli="from megacore.kernels.availability import triton_version")) == []


def test_what_says_nothing_of_itself_is_found() -> None:
    typed = '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self, x: int) -> int:\n        return x\n'
    assert rules.undocumented(planted(megacore__a=typed)) == []
    assert rules.undocumented(planted(megacore__a="x = 1")) == ["megacore/a.py has no docstring"]
    assert len(rules.undocumented(planted(megacore__utils='"""Doc."""'))) == 1
    assert len(rules.undocumented(planted(megacore__a='"""Doc."""\ndef f() -> None: ...'))) == 1
    assert len(rules.undocumented(planted(megacore__a=typed.replace(": int", "")))) == 1
    assert len(rules.undocumented(planted(megacore__a=typed.replace(" -> int", "")))) == 1
