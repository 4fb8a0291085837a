"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464): a matrix S that each position corrects and
reads instead of the keys and values before it,

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,    o_t = S_t^T q_t.

It is computed in chunks (section 3.3, after Yang et al. 2024, arXiv 2406.06484). From the state S_0 before a chunk,
with A_i = a_1 ... a_i, position i writes k_i u_i^T, and what it writes solves a triangular system:

    u_i = b_i (v_i - A_i S_0^T k_i - sum over j < i of (A_i / A_j) (k_i . k_j) u_j).

So U = Y - W S_0 with Y and W that need no state, and a chunk makes of a state M S_0 + N. All but the states before the
chunks, one small product each, is computed for all chunks at once.

The recurrence of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 6) corrects nothing: S_t = a_t S_{t-1} + b_t k_t
v_t^T. There u_i = b_i v_i, W is zero, and M a number, the decay of the chunk.

Shape legend: b micro-batch, n = g r heads, r to a query and a key, s sequence, k and v sizes of a head's key and value,
c chunks of i positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.ops.dispatch import operator, runs_triton

_CHUNK = 64  # positions; the system costs its square a position


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor,
    rate: Tensor,
    starts: Tensor | None = None,
    before: Tensor | Callable[[Tensor], Tensor] | None = None,
    corrects: bool = True,
) -> tuple[Tensor, Tensor]:
    """The outputs o [b, n, s, v] and the state after the last position [b, n, k, v], in fp32.

    Args:
        query: [b, g, s, k], already scaled.
        key: [b, g, s, k], of length 1 where it corrects.
        value: [b, n, s, v], of the r heads that share a query and a key side by side.
        decay: log a, at most 0, [b, n, s].
        rate: b, at least 0, and at most 1 where it corrects, [b, n, s].
        starts: [b, s] bool, the first positions of documents, which read nothing from before. None: there are none.
        before: the state [b, n, k, v] before the first position, or what gives it from what these positions make of any
            state, [b, n, k, v + k]: N and M side by side; as for `passed_on`. None: it is zero.
        corrects: whether a position erases what the state holds for its key, as the delta rule; else Mamba-2's.
    """
    if isinstance(before, Tensor) and value.shape[2] == 1 and starts is None:
        return _of_one_position(query, key, value, decay=decay, rate=rate, state=before, corrects=corrects)
    if corrects:
        query, key = (x.repeat_interleave(value.shape[1] // key.shape[1], 1) for x in (query, key))
    (s, wide), size, groups = value.shape[2:], min(_CHUNK, value.shape[2]), key.shape[1]
    padding = -s % size  # positions that write nothing and do not decay
    query, key, value = (F.pad(x.float(), (0, 0, 0, padding)).unflatten(2, (-1, size)) for x in (query, key, value))
    decay, rate = (F.pad(x.float(), (0, padding)).unflatten(2, (-1, size)) for x in (decay, rate))
    value, decay, rate = (x.unflatten(1, (groups, -1)) for x in (value, decay, rate.unsqueeze(-1)))
    sees = torch.ones(size, size, dtype=torch.bool, device=key.device).tril()
    # log A_i / A_j. Each is a sum of its own: the difference of two long sums has lost digits.
    logs = decay.unsqueeze(-1).where(sees.tril(-1), 0.0).cumsum(-2)
    enters, stays = decay.cumsum(-1).exp(), logs[..., -1, :].exp()  # of S_0 at a position, of a position at the end
    if starts is not None:
        documents = F.pad(starts, (0, padding)).unflatten(1, (-1, size)).cumsum(-1)[:, None, None]  # [b, 1, 1, c, i]
        sees = sees & (documents.unsqueeze(-1) == documents.unsqueeze(-2))
        enters = enters.masked_fill(documents > 0, 0.0)
        stays = stays.masked_fill(documents != documents[..., -1:], 0.0)
    ratios = logs.exp().masked_fill(~sees, 0.0)  # A_i / A_j
    enters, stays = enters.unsqueeze(-1), stays.unsqueeze(-1)
    if corrects:
        of_heads = key.unsqueeze(2)
        system = (key @ key.mT).unsqueeze(2) * ratios * rate
        known = torch.cat([value, of_heads * enters], -1) * rate
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        writes, erases = solved.split([wide, key.shape[-1]], -1)  # Y and W
        last, unit = (of_heads * stays).mT, torch.eye(key.shape[-1], device=key.device)
        passes = enters[..., -1:, :] * unit - last @ erases  # M, [b, g, r, c, k, k]
        makes = last @ writes  # N, [b, g, r, c, k, v]
    else:  # one product for all heads that share a key
        writes, unit = value * rate, torch.ones(key.shape[-1], 1, device=key.device)
        passes = enters[..., -1:, :] * unit  # the diagonal of M, [b, g, r, c, k, 1]
        makes = torch.einsum("bgcik,bgrciv->bgrckv", key, writes * stays)
    state = torch.zeros_like(makes[:, :, :, 0])
    if isinstance(before, Tensor):
        state = before.unflatten(1, (groups, -1))
    elif before is not None:
        state = torch.cat([state, unit.expand_as(passes[:, :, :, 0])], -1)
        makes = F.pad(makes, (0, unit.shape[-1]))
    flat = [x.flatten(0, 2).contiguous() for x in (passes, makes, state)]
    held, final = states_between_chunks(*flat).unflatten(0, state.shape[:3]).tensor_split([-1], 3)
    final = final.squeeze(3)
    if callable(before):
        first = before(final.flatten(1, 2)).unflatten(1, (groups, -1))
        final = final[..., :wide] + passed_on(final[..., wide:], first)
        held = held[..., :wide] + passed_on(held[..., wide:], first.unsqueeze(3))
    if corrects:
        writes, out = writes - erases @ held, query.unsqueeze(2) * enters @ held
    else:
        out = torch.einsum("bgcik,bgrckv->bgrciv", query, held) * enters
    out = out + (query @ key.mT).unsqueeze(2) * ratios @ writes
    return out.flatten(1, 2).flatten(2, 3)[:, :, :s], final.flatten(1, 2)


# ---- the states between chunks


def states_between_chunks(passes: Tensor, makes: Tensor, state: Tensor) -> Tensor:
    """S_{n+1} = M_n S_n + N_n from the state before the first chunk on: [h, c + 1, k, v], in fp32.

    Args:
        passes: M, [h, c, k, k], or its diagonal, [h, c, k, 1], contiguous.
        makes: N, [h, c, k, v], contiguous.
        state: [h, k, v], contiguous.
    """
    most = 128 if passes.shape[-1] > 1 else 512  # registers hold a state, beside M or its diagonal
    if passes.shape[2] <= most and runs_triton(passes, "passes"):
        found: Tensor = _in_one_launch(passes, makes, state, False)
        return found
    states = [state]
    for number in range(makes.shape[1]):
        states.append(makes[:, number] + passed_on(passes[:, number], states[-1]))
    return torch.stack(states, 1)


@operator("megacore::states_between_chunks")
def _in_one_launch(passes: Tensor, makes: Tensor, state: Tensor, backwards: bool) -> Tensor:
    import megacore.kernels.recurrence as kernel

    return kernel.states(passes, makes, state, backwards=backwards)


@_in_one_launch.register_fake
def _(passes: Tensor, makes: Tensor, state: Tensor, backwards: bool) -> Tensor:
    return makes.new_empty(makes.shape[0], makes.shape[1] + 1, *makes.shape[2:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    passes, states = ctx.saved_tensors
    grad = grad.contiguous()
    total = _in_one_launch(passes, grad[:, :-1], grad[:, -1], True)
    later, earlier = total[:, 1:], states[:, :-1]
    of_passes = later @ earlier.mT if passes.shape[-1] > 1 else (later * earlier).sum(-1, keepdim=True)
    return of_passes, later, total[:, 0], None


_in_one_launch.register_autograd(_differentiate, setup_context=_keep)


def _of_one_position(
    query: Tensor, key: Tensor, value: Tensor, *, decay: Tensor, rate: Tensor, state: Tensor, corrects: bool
) -> tuple[Tensor, Tensor]:
    """The recurrence itself, as `gated_delta_rule`: what a token of a generated text costs."""
    query, key = (x.float().repeat_interleave(value.shape[1] // key.shape[1], 1) for x in (query, key))
    kept = decay.float().exp().unsqueeze(-1) * state
    writes = rate.float().unsqueeze(-1) * (value.float() - key @ kept if corrects else value.float())
    state = kept + key.mT @ writes
    return query @ state, state


def passed_on(passes: Tensor, state: Tensor) -> Tensor:
    """M S, [..., k, v], of M [..., k, k], or of its diagonal [..., k, 1], where there is nothing beside it."""
    return passes @ state if passes.shape[-1] > 1 else passes * state


def causal_convolution(x: Tensor, weight: Tensor, *, before: Tensor | None = None, age: Tensor | None = None) -> Tensor:
    """Each feature's weighted sum of its last T values, in fp32: [b, s, f].

    Args:
        x: [b, s, f].
        weight: [f, 1, T], of the position itself last.
        before: the T - 1 positions before the first, [b, T - 1, f]. None: zeros.
        age: [b, s], how many earlier positions of its document a position has. None: it may read all.
    """
    weight, taps, s = weight[:, 0], weight.shape[-1], x.shape[1]
    x = F.pad(x.float(), (0, 0, taps - 1, 0)) if before is None else torch.cat([before.float(), x.float()], 1)
    total = x[:, taps - 1 :] * weight[:, -1]
    for back in range(1, taps):
        term = x[:, taps - 1 - back : taps - 1 - back + s]
        if age is not None:
            term = term.masked_fill((age < back).unsqueeze(-1), 0.0)
        total = total + term * weight[:, -1 - back]
    return total
