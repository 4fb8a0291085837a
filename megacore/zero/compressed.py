"""Sums over the replicas that travel in few bits, with error feedback on both sides.

Every rank adds what its earlier messages left out to its terms, sends each rank a compressed part of them (all-to-all),
and keeps what this message leaves out. The rank adds up the parts that it gets. To give every rank the whole sum, it
does the same with its part of the sum: compressed with what it left out before, it goes to all (all-gather). So
nothing is lost, only late (Seide et al. 2014; Tang et al. 2021, arXiv 2102.02888, algorithm 1 and section 5).

Both messages have the same size: of b bytes, a rank sends (n - 1) / n x b in each. Ranks add up in the order of the
group, so that every rank gets the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from megacore.config.compression import FORMATS, Format
from megacore.parallel.collectives import PartsExchanged, start_all_gather
from megacore.parallel.mesh import Group


class Code(ABC):
    """Writes blocks of numbers as bytes. One that is not finite makes its whole block so: every rank skips the step."""

    format: ClassVar[Format]

    @abstractmethod
    def encode(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """uint8 [blocks, block_bytes] of `x`, fp32 [blocks, block]. `mask`: bool, of x's shape: the others are 0. None:
        all count."""

    @abstractmethod
    def decode(self, message: Tensor, mask: Tensor | None) -> Tensor:
        """fp32 [blocks, block], 0 where the mask is not set, of `message`, uint8 [blocks, block_bytes]."""


class SignCode(Code):
    """The sign of each element, and a scale that gives the block its norm: C(x) = |x| / sqrt(n) sign(x), where n counts
    the elements of the mask (Tang et al. 2021, section 5). Zero counts as positive."""

    format = FORMATS["sign"]
    _BYTES = FORMATS["sign"].block // 8

    def encode(self, x: Tensor, mask: Tensor | None) -> Tensor:
        count = float(x.shape[1]) if mask is None else mask.sum(1).clamp(min=1)
        scales = torch.linalg.vector_norm(x, dim=1) / (torch.as_tensor(count).to(x) ** 0.5)
        message = torch.zeros(len(x), self.format.block_bytes, dtype=torch.uint8, device=x.device)
        signs, packed = (x >= 0).view(len(x), 8, self._BYTES), message[:, : self._BYTES]
        for bit in range(8):
            packed |= signs[:, bit].to(torch.uint8) << bit
        message[:, self._BYTES :] = scales.view(-1, 1).view(torch.uint8)
        return message

    def decode(self, message: Tensor, mask: Tensor | None) -> Tensor:
        packed, scales = message[:, : self._BYTES], message[:, self._BYTES :].contiguous().view(torch.float32)
        x = torch.empty(len(message), 8, self._BYTES, device=message.device)
        for bit in range(8):
            torch.sub((packed >> bit & 1) * 2.0, 1.0, out=x[:, bit])
        x = x.view(len(x), -1).mul_(scales)
        return x if mask is None else x.mul_(mask)


class Int8Code(Code):
    """To the nearest of 255 multiples of a scale, the largest magnitude of the block / 127."""

    format = FORMATS["int8"]

    def encode(self, x: Tensor, mask: Tensor | None) -> Tensor:
        scales = x.abs().amax(1, keepdim=True) / 127
        codes = (x / scales.where(scales > 0, 1.0)).nan_to_num_(0.0).clamp_(-127, 127).round_().to(torch.int8)
        return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], 1)

    def decode(self, message: Tensor, mask: Tensor | None) -> Tensor:
        block = self.format.block
        codes, scales = message[:, :block].view(torch.int8), message[:, block:].contiguous().view(torch.float32)
        return codes * scales


class BF16Code(Code):
    """Rounded to the nearest bf16."""

    format = FORMATS["bf16"]

    def encode(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x.bfloat16().view(torch.uint8)

    def decode(self, message: Tensor, mask: Tensor | None) -> Tensor:
        return message.contiguous().view(torch.bfloat16).float()


CODES: dict[str, Code] = {"sign": SignCode(), "int8": Int8Code(), "bf16": BF16Code()}


class CompressedSum:
    """Sums of flat tensors of one size over the group, with the errors of all earlier ones.

    Args:
        size: elements of the tensors, a multiple of the code's block.
        group: of two ranks or more.
        device: where the errors are kept.
        passes_on: whether every rank gets the whole sum; otherwise each its part.
    """

    def __init__(self, size: int, group: Group, code: Code, *, device: torch.device, passes_on: bool) -> None:
        block = code.format.block
        self._size, self._group, self._code = size, group, code
        self._part = -(-size // (block * group.size))  # blocks
        # What this rank's messages have left out of its terms, fp32 [blocks, block].
        self.worker_error = torch.zeros(self._part * group.size, block, device=device)
        # What its messages have left out of its part of the sums, likewise; None: it sends none.
        self.server_error = torch.zeros(self._part, block, device=device) if passes_on else None
        self._mask: Tensor | None = None
        self._exchange: PartsExchanged | None = None

    @property
    def part(self) -> slice:
        """The elements whose sum this rank computes; they may end beyond the tensors."""
        elements = self._part * self._code.format.block
        return slice(self._group.rank * elements, (self._group.rank + 1) * elements)

    @property
    def storages(self) -> list[Tensor]:
        return [held for held in (self.worker_error, self.server_error, self._mask) if held is not None]

    def restrict(self, counted: Tensor) -> None:
        """From now on only `counted` elements are summed: bool [size], the same on every rank; the others are 0."""
        self._mask = torch.zeros_like(self.worker_error, dtype=torch.bool)
        self._mask.view(-1)[: self._size] = counted
        self.worker_error.mul_(self._mask)
        if self.server_error is not None:
            self.server_error.mul_(self._mask.view(-1)[self.part].view_as(self.server_error))

    def begin(self, terms: Tensor, scale: float = 1.0) -> None:
        """Begin to sum. `terms`: of this rank, flat [size]; may change once this returns. `scale`: a factor not kept in
        errors."""
        x, group = self.worker_error, self._group
        x.view(-1)[: self._size].add_(terms, alpha=1.0 / scale)
        if self._mask is not None:
            x.mul_(self._mask)
        message = self._code.encode(x, self._mask)
        _leave_out(x, self._code.decode(message, self._mask))
        self._exchange = PartsExchanged(message.view(group.size, self._part, -1), group)

    def part_of_sum(self) -> Tensor:
        """This rank's part of the sum, fp32 [blocks, block], without the scale; what the group's ranks have begun."""
        assert self._exchange is not None
        received, self._exchange = self._exchange.wait(), None
        mask = self._part_of_mask()
        total = self._code.decode(received[0], mask)
        for message in received[1:]:
            total += self._code.decode(message, mask)
        return total

    def whole_sum(self) -> Tensor:
        """The sum, fp32 [size], without the scale; equal to the bit on all ranks, which call this together."""
        assert self.server_error is not None
        mask, x = self._part_of_mask(), self.server_error
        x += self.part_of_sum()
        message = self._code.encode(x, mask)
        _leave_out(x, self._code.decode(message, mask))
        messages = message.new_empty(self._group.size * message.numel())
        start_all_gather(messages, message.view(-1), self._group).wait()
        return self._code.decode(messages.view(-1, message.shape[1]), self._mask).view(-1)[: self._size]

    def _part_of_mask(self) -> Tensor | None:
        return None if self._mask is None else self._mask.view(-1)[self.part].view(self._part, -1)

    def gathered_server_error(self, whole: Tensor) -> Tensor:
        """All parts' errors, fp32 [size]; the group calls this together. `whole`: memory for them, like
        `worker_error`."""
        assert self.server_error is not None
        start_all_gather(whole, self.server_error.view(-1), self._group).wait()
        return whole[: self._size]


def _leave_out(x: Tensor, sent: Tensor) -> None:
    """What a message leaves out of x, in place; nothing where it is not finite, which skips the step."""
    x.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)
