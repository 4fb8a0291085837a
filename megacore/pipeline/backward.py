"""Backward of one microbatch through one stage, whole or in two halves, for any module.

Zero-bubble schedules want the gradient of a stage's input first, because another stage waits for it, and the gradients
of its weights later (Qi et al. 2023, arXiv 2401.10241, section 2). Autograd can be asked for the first alone: it then
runs every operator on the way from the output to the input, but computes no weight's gradient. What each of these
operators was given is kept, and the second half hands it to the operator again, and asks for its weights' gradients
alone. A weight that several operators share has one gradient, which autograd sums up on its way through all of them:
it is computed in the first half, and added in the second. No operator without weights of its own runs twice. What was
checkpointed (torch.utils.checkpoint) is computed again in the first half, and for each of its operators with weights
in the second, as autograd forgets it after every call.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from megacore.errors import UserError

_REENTRANT = "CheckpointFunctionBackward"  # the node of torch.utils.checkpoint with use_reentrant=True


class WeightHalf:
    """The second half of a backward, kept until it is wanted.

    Args:
        operators: with the weights that each takes in alone, and what it was given in the first half, in the order of a
            backward: all gradients of a layer are there before those of the layer before it.
        early: weights whose gradients the first half has computed, with these.
    """

    def __init__(self, operators: list[_Operator], early: list[tuple[Tensor, Tensor]] | None = None) -> None:
        self._operators, self._early = operators, early or []

    def run(self) -> None:
        """Add the weights' gradients to their `.grad`."""
        while self._early:
            weight, gradient = self._early.pop()
            torch.autograd.backward(weight, gradient)  # and not `+=`: hooks wait for it
        while self._operators:  # what each was given is let go of as soon as it is used
            operator = self._operators.pop(0)
            edges = [GradientEdge(operator.node, i) for i, grad in enumerate(operator.given) if grad is not None]
            given = [grad for grad in operator.given if grad is not None]
            if edges:
                torch.autograd.backward(edges, given, inputs=operator.weights, retain_graph=True)


class _Operator:
    """A node of the graph between output and input that takes in weights."""

    def __init__(self, node: Node, weights: list[Tensor], ran: list[_Operator]) -> None:
        self.node, self.weights, self._ran = node, weights, ran
        self.given: tuple[Tensor | None, ...] = ()
        self._hook = node.register_prehook(self.keep)

    def keep(self, grads: tuple[Tensor | None, ...]) -> None:
        """Remember what the first half gives, once."""
        self.given = grads
        self._ran.append(self)
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

    Raises:
        UserError: a layer is checkpointed in torch's old way, whose backward is one piece.
    """
    if not inputs or not outputs:
        return [None] * len(inputs), WeightHalf([])
    anchors = {edge.node for edge in inputs}
    on_the_way = _nodes_that_reach(anchors, [edge.node for edge in outputs])
    if any(node.name() == _REENTRANT for node in on_the_way):
        raise UserError(
            "a layer uses torch.utils.checkpoint with use_reentrant=True, whose backward cannot be split into the "
            "halves that this schedule wants: use use_reentrant=False, or a schedule that has whole backwards (1f1b)"
        )
    weights_of = {node: weights for node in on_the_way if (weights := _own_weights(node, on_the_way))}
    early = _early_weights(weights_of.values(), [edge.node for edge in outputs if edge.node not in on_the_way])
    ran: list[_Operator] = []  # in the order in which autograd comes to them
    operators = [
        _Operator(node, alone, ran)
        for node, weights in weights_of.items()
        if (alone := [weight for weight in weights if id(weight) not in early])
    ]
    wanted = [*inputs, *map(get_gradient_edge, early.values())]
    found = torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True)
    found, of_weights = found[: len(inputs)], found[len(inputs) :]
    for operator in operators:
        if operator.node in anchors and not operator.given:  # autograd stops in front of it
            own = {e.output_nr: grad for e, grad in zip(inputs, found, strict=True) if e.node is operator.node}
            operator.keep(tuple(own.get(i) for i in range(max(own) + 1)))
    pairs = zip(early.values(), of_weights, strict=True)
    return found, WeightHalf(ran, [(weight, grad) for weight, grad in pairs if grad is not None])


def _early_weights(of_operators: Iterable[list[Tensor]], beside: Sequence[Node]) -> dict[int, Tensor]:
    """The weights, by identity, whose gradients no operator has alone.

    Args:
        of_operators: the weights of each operator between output and input.
        beside: where outputs enter the graph that ignore the input.
    """
    early = {id(weight): weight for weight in _leaves(beside)}
    seen: set[int] = set()
    for weights in of_operators:
        early |= {id(weight): weight for weight in weights if id(weight) in seen}
        seen.update(map(id, weights))
    return early


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
