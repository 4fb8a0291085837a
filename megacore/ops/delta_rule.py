"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464): a matrix S that each position corrects and
reads instead of the keys and values before it,

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,    o_t = S_t^T q_t.

It is computed in chunks (section 3.3, after Yang et al. 2024, arXiv 2406.06484). From the state S_0 before a chunk,
with A_i = a_1 ... a_i, position i writes k_i u_i^T, and what it writes solves a triangular system:

    u_i = b_i (v_i - A_i S_0^T k_i - sum over j < i of (A_i / A_j) (k_i . k_j) u_j).

So U = Y - W S_0 with Y and W that need no state, and a chunk makes of a state M S_0 + N. All but the states before the
chunks, one small product each, is computed for all chunks at once.

Shape legend: b micro-batch, n heads, s sequence, k and v sizes of a head's key and value, c chunks of i positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64  # positions; the system costs its square a position


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor,
    rate: Tensor,
    starts: Tensor | None = None,
    before: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs o [b, n, s, v] and the state after the last position [b, n, k, v], in fp32.

    Args:
        query: [b, n, s, k], already scaled.
        key: [b, n, s, k], of length 1.
        value: [b, n, s, v].
        decay: log a, at most 0, [b, n, s].
        rate: b, between 0 and 1, [b, n, s].
        starts: [b, s] bool, the first positions of documents, which read nothing from before. None: there are none.
        before: gives the state [b, n, k, v] before the first position from what these positions make of any state,
            [b, n, k, v + k]: N and M side by side. None: it is zero.
    """
    (s, wide), size = value.shape[2:], min(_CHUNK, value.shape[2])
    padding = -s % size  # positions that write nothing and do not decay
    query, key, value = (F.pad(x.float(), (0, 0, 0, padding)).unflatten(2, (-1, size)) for x in (query, key, value))
    decay, rate = (F.pad(x.float(), (0, padding)).unflatten(2, (-1, size)) for x in (decay, rate))
    logs = decay.cumsum(-1)  # log A, [b, n, c, i]
    sees = torch.ones(size, size, dtype=torch.bool, device=key.device).tril()
    enters, stays = logs.exp(), (logs[..., -1:] - logs).exp()  # of S_0 at a position, of a position at the end
    if starts is not None:
        documents = F.pad(starts, (0, padding)).unflatten(1, (-1, size)).cumsum(-1).unsqueeze(1)  # [b, 1, c, i]
        sees = sees & (documents.unsqueeze(-1) == documents.unsqueeze(-2))
        enters = enters.masked_fill(documents > 0, 0.0)
        stays = stays.masked_fill(documents != documents[..., -1:], 0.0)
    # Masked before exp: the other half of the differences may be too large for it.
    ratios = (logs.unsqueeze(-1) - logs.unsqueeze(-2)).masked_fill(~sees, -torch.inf).exp()  # A_i / A_j
    system = key @ key.mT * ratios * rate.unsqueeze(-1)
    known = torch.cat([value, key * enters.unsqueeze(-1)], -1) * rate.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    writes, erases = solved.split([wide, key.shape[-1]], -1)  # Y and W
    last = (key * stays.unsqueeze(-1)).mT
    eye = torch.eye(key.shape[-1], device=key.device)
    passes = enters[..., -1, None, None] * eye - last @ erases  # M, [b, n, c, k, k]
    makes = last @ writes  # N, [b, n, c, k, v]
    state = torch.zeros_like(makes[:, :, 0])
    if before is not None:
        state = torch.cat([state, eye.expand_as(passes[:, :, 0])], -1)
        makes = F.pad(makes, (0, key.shape[-1]))
    states = [state]
    for number in range(makes.shape[2]):
        states.append(makes[:, :, number] + passes[:, :, number] @ states[-1])
    *entering, final = states
    held = torch.stack(entering, 2)
    if before is not None:
        first = before(final)
        final = final[..., :wide] + final[..., wide:] @ first
        held = held[..., :wide] + held[..., wide:] @ first.unsqueeze(2)
    written = writes - erases @ held
    out = query * enters.unsqueeze(-1) @ held + query @ key.mT * ratios @ written
    return out.flatten(2, 3)[:, :, :s], final


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
