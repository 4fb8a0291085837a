"""Backward of one microbatch through one stage, whole or in two halves, for any module.

Zero-bubble schedules compute the gradient of a stage's input first, because another stage waits for it, and the
gradients of its weights later (Qi et al. 2023, arXiv 2401.10241, section 2). In the first half autograd is asked only
for the gradient of the input: it runs every operator between output and input, but computes no weight gradients. The
output gradients of the operators with weights are kept. In the second half these operators run again, from the kept
gradients, for the gradients of their weights only. A weight that several operators share has one gradient, the sum over
all of them: autograd computes it in the first half, and it is added in the second. No operator without weights runs
twice. A checkpointed part (torch.utils.checkpoint) is recomputed in the first half, and once more in the second for
each of its operators with weights, because autograd frees it after every call.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.autograd.graph import _engine_run_backward as _run_engine
from torch.torch_version import TorchVersion

from megacore.errors import UserError

# Whether the Python object of a node keeps the node alive, also where its operator is written in Python.
_OBJECT_KEEPS_NODE = TorchVersion(torch.__version__) >= "2.13"
_REENTRANT = "CheckpointFunctionBackward"  # the node of torch.utils.checkpoint with use_reentrant=True


# `torch.autograd.backward` without its comparison of shapes, for which it imports a computer algebra system: a second
# for every rank. Takes tuples: where the backward begins, and the gradients there; `inputs`, whose gradients are added
# to their `.grad` (none: of all leaves); and `keep_graph`, torch's `retain_graph`.
accumulate_gradients = partial(
    _run_engine, keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True
)


class WeightHalf:
    """The second half of a backward, to be run later. `operators`: with weights and kept gradients, in the order of a
    backward, so that all weight gradients of a layer are computed before those of the layer before it. `shared`:
    weights of several operators, with the gradients that the first half has computed."""

    def __init__(self, operators: list[_Operator], shared: list[tuple[Tensor, Tensor]] | None = None) -> None:
        self._operators, self._shared = operators, shared or []

    def run(self) -> None:
        while self._shared:
            weight, gradient = self._shared.pop()
            accumulate_gradients((weight,), (gradient,))  # instead of `+=`, so that hooks run
        while self._operators:  # the kept gradients of each are freed once they are used
            operator = self._operators.pop(0)
            kept = [(i, grad) for i, grad in enumerate(operator.output_gradients) if grad is not None]
            if kept:
                edges = tuple(GradientEdge(operator.node, i) for i, _ in kept)
                gradients = tuple(grad for _, grad in kept)
                accumulate_gradients(edges, gradients, inputs=tuple(operator.weights), keep_graph=True)


class _Operator:
    """A graph node between output and input with weights among its inputs; keeps the gradients of its outputs. `node`:
    whose backward runs once more. `ran`: to which the operator adds itself when autograd comes to it. `owner`: keeps
    the node alive where its Python object does not; None: it does."""

    def __init__(self, node: Node, weights: list[Tensor], ran: list[_Operator], owner: Node | None) -> None:
        self.node, self.weights, self._ran, self.owner = node, weights, ran, owner
        self.output_gradients: tuple[Tensor | None, ...] = ()
        self._hook = node.register_prehook(self.keep)

    def keep(self, grads: tuple[Tensor | None, ...]) -> None:
        """Keep the gradients of the first half; later calls are the second half's."""
        self.output_gradients = grads
        self._ran.append(self)
        self._hook.remove()


def input_half(
    outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[GradientEdge]
) -> tuple[Sequence[Tensor | None], WeightHalf]:
    """One gradient for each of `inputs`, and the second half, which computes those of the weights. `outputs`: graph
    edges of the stage's outputs. `inputs`: graph edges of the stage's inputs or, if these need no gradient, of the
    outputs of its first layer. Raises UserError where a layer uses reentrant checkpointing, whose backward cannot be
    split."""
    if not inputs or not outputs:
        return [None] * len(inputs), WeightHalf([])
    anchors = {edge.node for edge in inputs}
    between = _nodes_that_reach(anchors, [edge.node for edge in outputs])
    if any(node.name() == _REENTRANT for node in between):
        raise UserError(
            "a layer uses torch.utils.checkpoint with use_reentrant=True, whose backward cannot be split into the "
            "halves that this schedule wants: use use_reentrant=False, or a schedule that has whole backwards (1f1b)"
        )
    weights_of = {node: weights for node in between if (weights := _weights_of(node, between))}
    shared = _shared_weights(weights_of.values(), [edge.node for edge in outputs if edge.node not in between])
    owners = {} if _OBJECT_KEEPS_NODE else _owners(between, outputs)
    ran: list[_Operator] = []  # in the order in which autograd comes to them
    operators = [
        _Operator(node, unshared, ran, owners.get(node))
        for node, weights in weights_of.items()
        if (unshared := [weight for weight in weights if id(weight) not in shared])
    ]
    wanted = [*inputs, *map(get_gradient_edge, shared.values())]
    computed = _run_engine(tuple(outputs), tuple(gradients), True, False, tuple(wanted), True, accumulate_grad=False)
    input_gradients, shared_gradients = computed[: len(inputs)], computed[len(inputs) :]
    for operator in operators:
        if operator.node in anchors and not operator.output_gradients:  # autograd stops in front of it
            edges = zip(inputs, input_gradients, strict=True)
            by_output = {edge.output_nr: grad for edge, grad in edges if edge.node is operator.node}
            operator.keep(tuple(by_output.get(i) for i in range(max(by_output) + 1)))
    pairs = zip(shared.values(), shared_gradients, strict=True)
    return input_gradients, WeightHalf(ran, [(weight, grad) for weight, grad in pairs if grad is not None])


def _shared_weights(of_operators: Iterable[list[Tensor]], independent: Sequence[Node]) -> dict[int, Tensor]:
    """The weights, by identity, whose gradients are not computed by exactly one operator. `of_operators`: the weights
    of each operator between output and input. `independent`: nodes of outputs that do not depend on the input."""
    shared = {id(weight): weight for weight in _leaves(independent)}
    seen: set[int] = set()
    for weights in of_operators:
        shared |= {id(weight): weight for weight in weights if id(weight) in seen}
        seen.update(map(id, weights))
    return shared


def _nodes_that_reach(targets: set[Node], roots: Sequence[Node]) -> dict[Node, None]:
    """The nodes on a path from a root to a target, both included, in an order that is the same on every rank."""
    reaches: dict[Node, bool] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            reaches[node] = node in targets or any(reaches.get(child, False) for child in _children(node))
        elif node not in reaches:
            reaches[node] = node in targets  # updated when it is popped again, after its children
            stack.append((node, True))
            stack += [(child, False) for child in _children(node)]
    return {node: None for node, does in reaches.items() if does}


def _owners(between: Iterable[Node], outputs: Sequence[GradientEdge]) -> dict[Node, Node | None]:
    """For each node, one that leads to it and is not written in Python; None: the node is an output that has none.
    `between`: nodes, each after one that leads to it. `outputs`: edges of the first nodes."""
    owners: dict[Node, Node | None] = {edge.node: edge.ownership_token for edge in outputs}
    for node in between:
        owner = owners[node] if issubclass(type(node), BackwardCFunction) else node
        for child in _children(node):
            owners.setdefault(child, owner)
    return owners


def _weights_of(node: Node, between: Container[Node]) -> list[Tensor]:
    """The leaves that a node depends on through other paths than those to the input."""
    return _leaves(child for child in _children(node) if child not in between)


def _leaves(nodes: Iterable[Node]) -> list[Tensor]:
    """The leaves that these nodes are or depend on."""
    leaves: dict[int, Tensor] = {}
    stack = list(nodes)
    seen = set(stack)
    while stack:
        current = stack.pop()
        if (leaf := getattr(current, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        fresh = [child for child in _children(current) if child not in seen]
        seen.update(fresh)
        stack += fresh
    return list(leaves.values())


def _children(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)
