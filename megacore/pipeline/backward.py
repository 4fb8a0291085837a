"""Backward of one microbatch through one stage, whole or in two halves, for any module.

Zero-bubble schedules want the gradient of a stage's input first, because another stage waits for it, and the gradients
of its weights later (Qi et al. 2023, arXiv 2401.10241, section 2). Autograd can be asked for the first alone: it then
runs every operator on the way from the output to the input, but computes no weight's gradient. What each of these
operators was given is kept, and the second half hands it to the operator again, and asks for its weights' gradients
alone: nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node


class WeightHalf:
    """The second half of a backward, kept until it is wanted.

    Args:
        operators: with the weights that each takes in, and what it was given in the first half.
        otherwise: outputs, gradients and weights of a backward that cannot be divided, which is done whole.
    """

    def __init__(self, operators: list[_Operator], otherwise: tuple[Any, Any, Any] | None = None) -> None:
        self._operators, self._otherwise = operators, otherwise

    def run(self) -> None:
        """Add the weights' gradients to their `.grad`."""
        if self._otherwise is not None:
            outputs, gradients, weights = self._otherwise
            torch.autograd.backward(outputs, gradients, inputs=weights)
        for operator in self._operators:
            edges = [GradientEdge(operator.node, i) for i, grad in enumerate(operator.given) if grad is not None]
            given = [grad for grad in operator.given if grad is not None]
            if edges:
                torch.autograd.backward(edges, given, inputs=operator.weights, retain_graph=True)
        self._operators, self._otherwise = [], None


class _Operator:
    """A node of the graph between output and input that takes in weights."""

    def __init__(self, node: Node, weights: list[Tensor]) -> None:
        self.node, self.weights = node, weights
        self.given: tuple[Tensor | None, ...] = ()
        self._hook = node.register_prehook(self._keep)

    def _keep(self, grads: tuple[Tensor, ...]) -> None:
        self.given = grads
        self.forget()

    def forget(self) -> None:
        """Listen no more."""
        self._hook.remove()


def input_half(
    outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[GradientEdge]
) -> tuple[Sequence[Tensor | None], WeightHalf]:
    """The gradients of `inputs`, and what is left to do for the weights.

    Args:
        outputs: of the stage, where they enter its graph.
        gradients: of the outputs.
        inputs: leaves or not: the stage's inputs, or, where these need no gradient, what its first layer made of them.

    Returns:
        One gradient for each input, and the other half.
    """
    if not inputs or not outputs:
        return [None] * len(inputs), WeightHalf([])
    anchors = {edge.node for edge in inputs}
    on_the_way = _nodes_that_reach(anchors, [edge.node for edge in outputs])
    operators = [_Operator(node, weights) for node in on_the_way if (weights := _own_weights(node, on_the_way))]
    everything = [weight for operator in operators for weight in operator.weights]
    beside = _leaves(edge.node for edge in outputs if edge.node not in on_the_way)  # of outputs that ignore the input
    everything += beside
    if beside or len(set(map(id, everything))) < len(everything):  # or a weight that two operators share
        for operator in operators:
            operator.forget()
        found = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
        return found, WeightHalf([], (outputs, gradients, list({id(w): w for w in everything}.values())))
    found = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
    for operator in operators:
        if operator.node in anchors and not operator.given:  # autograd stops in front of it
            own = {e.output_nr: grad for e, grad in zip(inputs, found, strict=True) if e.node is operator.node}
            operator.given = tuple(own.get(i) for i in range(max(own) + 1))
    return found, WeightHalf(operators)


def _nodes_that_reach(targets: set[Node], roots: Sequence[Node]) -> dict[Node, None]:
    """The nodes on a way from a root to a target, both ends included, in an order that is the same on every rank."""
    reaches: dict[Node, bool] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            reaches[node] = node in targets or any(reaches.get(child, False) for child in _children(node))
        elif node not in reaches:
            reaches[node] = node in targets  # its children's are known when it is seen again
            stack.append((node, True))
            stack += [(child, False) for child in _children(node)]
    return {node: None for node, found in reaches.items() if found}


def _own_weights(node: Node, on_the_way: Container[Node]) -> list[Tensor]:
    """The leaves that a node takes in on other ways than those to the input."""
    return _leaves(child for child in _children(node) if child not in on_the_way)


def _leaves(nodes: Iterable[Node]) -> list[Tensor]:
    """The leaves that these nodes are, or take in."""
    found: dict[int, Tensor] = {}
    stack = list(nodes)
    seen = set(stack)
    while stack:
        current = stack.pop()
        if (leaf := getattr(current, "variable", None)) is not None:
            found[id(leaf)] = leaf
        fresh = [child for child in _children(current) if child not in seen]
        seen.update(fresh)
        stack += fresh
    return list(found.values())


def _children(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)
