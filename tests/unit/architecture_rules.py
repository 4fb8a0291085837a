"""The rules of the house as functions: each takes the parsed sources and returns the violations, one line each.

Read from the syntax tree, without importing anything. `test_architecture.py` applies every rule to the repository and
to planted violations. Where a rule has exceptions, they stand in `architecture.toml`.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("architecture.toml").read_text(encoding="utf-8"))
LATE_IMPORTS = [
    (path, name) for files in TABLES["late_imports"].values() for path, names in files.items() for name in names
]
DISTRIBUTED, ALLOWED = TABLES["distributed"], TABLES["allowed"]
FILES, DEVICE_SEAM = "megacore/files.py", "megacore/parallel/mesh.py"
# Downwards only: a group may import the groups of the lines above it, and itself, but no other group of its own line.
ORDER = tuple(set(groups) for groups in TABLES["order"])
TRAINER = ("ops", "parallel", "layers", "models", "pipeline", "zero", "optim", "train")
LEVEL = {group: level for level, groups in enumerate(ORDER) for group in groups}
FOLDERS = ("megacore", "kernels", "tools", "tests", "benchmarks")
PACKAGES = {name for groups in ORDER for name in groups} - {"scripts", "tools", "tests"}
POINT_TO_POINT = {
    "send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv", "send_object_list", "recv_object_list",
}  # fmt: skip
COLLECTIVES = re.compile(r"all_|reduce|gather|scatter|broadcast|barrier|monitored_barrier")
MESH_COLLECTIVES = {"barrier"}  # before the groups are destroyed


@dataclass(frozen=True)
class Source:
    """One file of the repository: its path from the root, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The whole tree, which many rules walk through."""
        return list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """The dotted name under which it is imported."""
        path = PurePosixPath(self.path).with_suffix("")
        parts = path.parts[:-1] if path.name == "__init__" else path.parts
        return ".".join(("megacore", *parts) if parts[0] == "kernels" else parts)

    @property
    def group(self) -> str:
        """The group of the import order that it belongs to."""
        return group_of(self.module)

    @property
    def is_ours(self) -> bool:
        """Whether it is product code, not a test or a benchmark."""
        return self.group != "tests"

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self.tree))


def dotted(node: ast.AST) -> str:
    """The x.y of a name with its attributes; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, and how it is imported."""

    module: str
    line: int
    late: bool  # not at the head of the module
    typing: bool  # under `if TYPE_CHECKING`


def group_of(module: str) -> str:
    """The group of a dotted module name: a package of megacore, `config` for megacore's own modules, or a top level.

    Benchmarks belong to the tests: nothing that is installed may import them.
    """
    parts = module.split(".")
    if parts[0] == "benchmarks":
        return "tests"  # they measure what tests check, and each uses what is in the other
    if parts[0] != "megacore":
        return parts[0] if parts[0] in ("tools", "tests") else "scripts"
    name = parts[1] if len(parts) > 1 else "config"
    return name if name in PACKAGES else "config"


def _imports(tree: ast.Module) -> Iterator[Import]:
    waiting = deque[tuple[ast.AST, bool, bool]]((node, False, False) for node in tree.body)
    while waiting:
        node, late, typing = waiting.popleft()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, late, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from a import b` may name the module a.b: both are given, and the unknown one is ignored later.
            base = ("." * node.level) + (node.module or "")
            yield Import(base, node.lineno, late, typing)
            yield from (Import(f"{base}.{alias.name}", node.lineno, late, typing) for alias in node.names)
        elif isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
            waiting += [(child, late, True) for child in node.body]
        else:
            # What is no statement imports nothing, and is most of the tree.
            inside = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
            waiting += [(child, True, typing) for child in inside]


def upward_imports(sources: Iterable[Source]) -> list[str]:
    """Imports that point upwards or sideways in ORDER; those for types only count too, but at the front door, whose
    names stand for what lies below."""
    found = []
    for source in sources:
        for item in source.imports:
            if source.module == "megacore" and item.typing:
                continue
            if item.module.split(".")[0] not in ("megacore", "tools", "tests", "benchmarks"):
                if item.module.startswith(("pretrain_", ".")):
                    found.append(f"{source.path}:{item.line} imports {item.module}: no script, and no relative import")
                continue
            own, other = source.group, group_of(item.module)
            if own in TRAINER and other in ("data", "checkpoint") and item.module.count(".") > 2:
                found.append(f"{source.path}:{item.line} imports {item.module}: import the name from megacore.{other}")
            if item.module == "megacore" or own == other or LEVEL[other] < LEVEL[own]:
                continue
            found.append(f"{source.path}:{item.line} imports {item.module}: {own} may not import {other}")
    return sorted(set(found))


def import_graph(sources: Iterable[Source], *, late: bool) -> dict[str, set[str]]:
    """Module -> modules of ours that importing it loads; with `late` also what its functions import."""
    known = {source.module: source for source in sources}
    graph = {}
    for name, source in known.items():
        direct = {item.module for item in source.imports if not item.typing and (late or not item.late)}
        graph[name] = {module for module in direct if module in known and module != name}
    return graph


def cycles(sources: Iterable[Source]) -> list[str]:
    """Import cycles between modules, those that an import inside a function dodges included."""
    graph = import_graph(sources, late=True)
    found: set[str] = set()
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            ring = path[path.index(name) :]
            first = ring.index(min(ring))
            found.add(" -> ".join([*ring[first:], *ring[:first], ring[first]]))
        elif name not in done:
            for following in sorted(graph[name]):
                visit(following, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return sorted(found)


def late_imports(sources: Iterable[Source]) -> list[str]:
    """Imports inside functions or conditions that are not on the list; `from a import b` is listed under a.

    An entry point imports inside its functions what loads torch (`early_torch`).
    """
    found = set()
    for source in sources:
        late = [item for item in source.imports if item.late and source.is_ours and source.group != "scripts"]
        for item in late:
            names = accumulate(item.module.split("."), "{}.{}".format)  # a, a.b, a.b.c
            if not any((source.path, name) in LATE_IMPORTS for name in names):
                found.add(f"{source.path}:{item.line} imports {item.module} inside a function, a condition or a try")
    return sorted(found)


def early_torch(sources: Iterable[Source]) -> list[str]:
    """Entry points and modules of `config`, `plan`, `watch` and `data` whose import loads torch (or transformers)."""
    sources = list(sources)
    by_name = {source.module: source for source in sources}
    graph = import_graph(sources, late=False)

    def reaches(name: str, seen: set[str]) -> str | None:
        seen.add(name)
        for item in by_name[name].imports:
            if item.module.split(".")[0] in ("torch", "transformers") and not (item.late or item.typing):
                return by_name[name].path
        return next((path for near in graph[name] - seen if (path := reaches(near, seen))), None)

    groups = ("scripts", "config", "plan", "watch", "data")
    checked = [s for s in sources if s.group in groups and s.path not in ALLOWED["torch"]]
    return [f"{s.path} loads torch, through {path}" for s in checked if (path := reaches(s.module, set()))]


def stray_communication(sources: Iterable[Source]) -> list[str]:
    """torch.distributed outside its files, or in the wrong one of them."""
    found = []
    for source in sources:
        role = DISTRIBUTED.get(source.path)
        if not source.is_ours:
            continue
        if role is None:
            found += [
                f"{source.path}:{item.line} imports {item.module}: it belongs to {', '.join(DISTRIBUTED)}"
                for item in source.imports
                if item.module.startswith("torch.distributed") and not item.typing
            ]
        for node in source.nodes:
            if not isinstance(node, ast.Attribute) or dotted(node.value) not in ("dist", "torch.distributed"):
                continue
            is_barrier = source.path == DEVICE_SEAM and node.attr in MESH_COLLECTIVES
            if node.attr in POINT_TO_POINT:
                if role != "point-to-point":
                    found.append(f"{source.path}:{node.lineno} calls {node.attr}: it belongs to pipeline/transport.py")
            elif COLLECTIVES.match(node.attr) and role != "collectives" and not is_barrier:
                found.append(f"{source.path}:{node.lineno} calls {node.attr}: it belongs to parallel/collectives.py")
    return sorted(set(found))


def cuda_by_name(sources: Iterable[Source]) -> list[str]:
    """`torch.cuda`, `.cuda()` and the string "cuda" outside the one seam for the device."""
    found = []
    for source in sources:
        if not source.is_ours or source.path == DEVICE_SEAM or source.path in TABLES["cuda_names"]:
            continue
        for node in source.nodes:
            text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value
            if (isinstance(node, ast.Attribute) and node.attr == "cuda") or (
                text and re.fullmatch(r"cuda(:\d*)?", text)
            ):
                found.append(f"{source.path}:{getattr(node, 'lineno', 0)} names cuda: ask {DEVICE_SEAM}")
    return found


def replicas_by_name(sources: Iterable[Source]) -> list[str]:
    """The number of replicas as a field `dp`: what counts samples or ranks asks for the role of the ranks."""
    return [
        f"{source.path}:{node.lineno} reads .dp: use ranks_of_role, or microbatches of the configuration"
        for source in sources
        if source.path.startswith("megacore/") and source.path not in ALLOWED["degrees"]
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr == "dp"
    ]


def stray_file_replacement(sources: Iterable[Source]) -> list[str]:
    """Locks and atomic writes outside the one module that has them."""
    found = []
    for source in sources:
        if not source.path.startswith("megacore/") or source.path in TABLES["file_replacers"]:
            continue
        fcntl = (item.line for item in source.imports if item.module == "fcntl")
        found += [f"{source.path}:{line} imports fcntl: use {FILES}" for line in fcntl]
        found += [
            f"{source.path}:{node.lineno} calls os.replace: use replacing of {FILES}"
            for node in source.nodes
            if isinstance(node, ast.Attribute) and dotted(node) == "os.replace"
        ]
    return found


def pickles(sources: Iterable[Source]) -> list[str]:
    """Anything that reads or writes a pickle."""
    found = []
    for source in sources:
        if not source.is_ours:
            continue
        modules = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
        modules -= {"pickle"} if source.path in ALLOWED["pickles"] else set()
        found += [f"{source.path}:{i.line} imports {i.module}" for i in source.imports if i.module in modules]
        for node in source.nodes:
            if source.path not in ALLOWED["pickles"] and (text := dotted(node)) in ("torch.load", "torch.save"):
                found.append(f"{source.path}:{getattr(node, 'lineno', 0)} uses {text}, which is a pickle")
            if isinstance(node, ast.keyword) and node.arg == "weights_only" and ast.unparse(node.value) != "True":
                found.append(f"{source.path}:{node.value.lineno} lets torch.load run what a pickle says")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                found.append(f"{source.path}:{node.value.lineno} allows pickles")
    return found


def stray_kernels(sources: Iterable[Source]) -> list[str]:
    """Imports of kernels by others than operators; whether Triton is there, anyone may ask."""
    return [
        f"{source.path}:{item.line} imports {item.module}: call the operator of megacore.ops"
        for source in sources
        if source.is_ours and source.group not in ("kernels", "ops") and source.path not in ALLOWED["kernels"]
        for item in source.imports
        if item.module.startswith("megacore.kernels.") and not item.module.startswith("megacore.kernels.availability")
    ]


def catch_alls(sources: Iterable[Source]) -> list[str]:
    """Modules whose names do not say what they do."""
    stems = {source.path: PurePosixPath(source.path).stem for source in sources}
    names = ("utils", "helpers", "misc", "common")
    return [f"{path}: a module is named for what it does" for path, stem in stems.items() if stem in names]


def private_names(sources: Iterable[Source]) -> list[str]:
    """Tests that read, import or replace a private name of a module, class or object of ours."""
    found, sources = [], list(sources)
    fields = {
        node.attr
        for source in sources
        if source.path.startswith("megacore/")
        for node in source.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self"
    }
    for source in sources:
        if not source.path.startswith("tests/") or source.path in ALLOWED["private_names"]:
            continue
        froms = [node for node in source.nodes if isinstance(node, ast.ImportFrom) and node.module]
        ours = [alias for node in froms if str(node.module).split(".")[0] == "megacore" for alias in node.names]
        owners = {alias.asname or alias.name for alias in ours}
        names = [(alias.lineno, alias.name) for alias in ours]
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and (
                dotted(node.value).split(".")[0] in owners or (node.attr in fields and dotted(node.value) != "self")
            ):
                names.append((node.lineno, node.attr))
            if isinstance(node, ast.Call) and len(node.args) > 1 and dotted(node.args[0]).split(".")[0] in owners:
                names.append((node.lineno, str(getattr(node.args[1], "value", ""))))
        found += [f"{source.path}:{line} uses {n}: give it a public name" for line, n in names if re.match("_[^_]", n)]
    return found
