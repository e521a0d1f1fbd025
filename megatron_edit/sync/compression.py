"""Compression of what crosses the sync group, and a sum over the replicas of which every message is compressed.

A codec turns fp32 [n] into bytes and back, for any n >= 0, deterministically:

    bf16   round to nearest bfloat16                                             2 bytes an element
    int8   blocks of 256, scale = largest absolute value / 127, round to nearest  1 byte + 4 bytes a block
    int4   blocks of 128, scale = largest absolute value / 7, two elements a byte 1/2 byte + 4 bytes a block

The last block may be shorter. Scales are fp32 and at least 2^-126, so that nothing is divided by 0.

Error of one element (`error_bound`): half a step of its block, that is max/254 (int8), max/14 (int4), where max is the
block's largest absolute value; bf16: 2^-8 of the element. It holds for values up to 3.3e38. A block with a non-finite
element comes back non-finite.

A sum over R replicas (`CompressedSum`) takes two stages, so that each replica sends about what one compressed copy
takes, twice, and adds in fp32. [n] is cut into R chunks, each replica owns one:

    x_i     := contribution_i + error_i
    stage 1    replica i encodes chunk c of x_i for the owner of c (all-to-all); error_i := x_i - decoded
    stage 2    the owner adds the decoded chunks in the order of the replicas, encodes the sum, and adds what that loses
               to its own error; all replicas gather the bytes and decode them

All decode the same bytes, so the result is the same bit for bit on all. Nothing is lost for good: over any number of
sums, the results add up to the contributions, less the errors that are still held (error feedback as in
arXiv 1809.07599 and, in two stages, arXiv 2102.02888; blocks and details are ours). One result differs from the exact
sum of the x_i by at most sum_i error_bound(x_i) + error_bound(sum of the decoded).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32 number
ALIGNMENT = 16  # bytes; chunks of a message start at multiples, so that a payload can be seen as fp32


class Codec(ABC):
    """fp32 [n] to bytes and back. A payload starts at a multiple of 4 bytes of its storage, and may be longer."""

    name: str

    @abstractmethod
    def payload_bytes(self, n: int) -> int:
        """Bytes of the payload of n elements."""

    @abstractmethod
    def encode_(self, x: Tensor, payload: Tensor) -> None:
        """payload uint8 [m], m >= payload_bytes(n) := x fp32 [n], contiguous, which is only read."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """out fp32 [n], contiguous := payload uint8 [m]."""

    @abstractmethod
    def error_bound(self, x: Tensor) -> Tensor:
        """fp32 [n]: |x - decoded| is at most this, element by element. x fp32 [n], up to 3.3e38 in absolute value."""


class BFloat16Codec(Codec):
    """Round to nearest, ties to even."""

    name = "bf16"

    def payload_bytes(self, n: int) -> int:
        """See Codec."""
        return 2 * n

    def encode_(self, x: Tensor, payload: Tensor) -> None:
        """See Codec."""
        payload[: 2 * x.numel()].view(torch.bfloat16).copy_(x)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """See Codec."""
        out.copy_(payload[: 2 * out.numel()].view(torch.bfloat16))

    def error_bound(self, x: Tensor) -> Tensor:
        """Half a step: 2^-8 relative (8 significant bits); 2^-134 below the smallest normal number."""
        return (x.abs() * 2.0**-8).clamp(min=2.0**-134)


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Symmetric integers with one fp32 scale a block. Payload: the scales, then the integers.

    name    of the codec
    block   elements that share a scale
    levels  largest integer; the smallest is its negative
    bits    8, or 4: elements i and i + ceil(n/2) share a byte (low, high), as integer + 8
    """

    name: str
    block: int
    levels: int
    bits: int

    def payload_bytes(self, n: int) -> int:
        """See Codec."""
        return 4 * self._num_blocks(n) + -(-n * self.bits // 8)

    def encode_(self, x: Tensor, payload: Tensor) -> None:
        """See Codec. Allocates one fp32 [n]."""
        scales, integers = self._parts(payload, x.numel())
        quotients = torch.empty_like(x)
        for values, scale, quotient in zip(
            self._blocks(x), self._scale_rows(scales, x.numel()), self._blocks(quotients), strict=True
        ):
            # Two passes without a temporary of [n]; a norm of order infinity takes ten times as long on a CPU.
            largest, smallest = values.amax(dim=1, keepdim=True), values.amin(dim=1, keepdim=True)
            torch.maximum(largest, smallest.neg_(), out=scale)
            scale.div_(self.levels).clamp_(min=SMALLEST_SCALE)
            torch.div(values, scale, out=quotient).round_()
        if self.bits == 8:
            integers.view(torch.int8).copy_(quotients)
            return
        half = integers.numel()
        quotients.add_(8)  # 1 to 15
        integers.copy_(quotients[:half])
        integers[: x.numel() - half].add_(quotients[half:].to(torch.uint8), alpha=16)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """See Codec."""
        scales, integers = self._parts(payload, out.numel())
        if self.bits == 8:
            out.copy_(integers.view(torch.int8))
        else:
            half = integers.numel()
            out[:half].copy_(integers & 15)
            out[half:].copy_(integers[: out.numel() - half] >> 4)
            out.sub_(8)
        for values, scale in zip(self._blocks(out), self._scale_rows(scales, out.numel()), strict=True):
            values.mul_(scale)

    def error_bound(self, x: Tensor) -> Tensor:
        """Half a step of the block; 2^-15 of a step more for the rounding of the division and the product."""
        bound = torch.empty_like(x)
        for values, out in zip(self._blocks(x), self._blocks(bound), strict=True):
            step = (values.abs().amax(dim=1, keepdim=True) / self.levels).clamp(min=SMALLEST_SCALE)
            out.copy_((step * (0.5 + 2.0**-15)).expand_as(out))
        return bound

    def _num_blocks(self, n: int) -> int:
        return -(-n // self.block)

    def _parts(self, payload: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Views: scales fp32 [blocks], integers uint8."""
        at, end = 4 * self._num_blocks(n), self.payload_bytes(n)
        return payload[:at].view(torch.float32), payload[at:end]

    def _blocks(self, flat: Tensor) -> list[Tensor]:
        """Views of [n]: the whole blocks [k, block], and [1, rest] where there is a rest."""
        whole = flat.numel() // self.block * self.block
        parts = [flat[:whole].view(-1, self.block), flat[whole:].view(1, -1)]
        return [part for part in parts if part.numel()]

    def _scale_rows(self, scales: Tensor, n: int) -> list[Tensor]:
        """Views of the scales [blocks, 1], cut as `_blocks` cuts n elements."""
        whole = n // self.block
        return [part.view(-1, 1) for part in (scales[:whole], scales[whole:]) if part.numel()]


CODECS: dict[str, Codec] = {
    "bf16": BFloat16Codec(),
    "int8": BlockCodec("int8", block=256, levels=127, bits=8),
    "int4": BlockCodec("int4", block=128, levels=7, bits=4),
}


def codec_of(name: str) -> Codec:
    """The codec of that name, a value of --edit-comm-dtype. Raises ValueError, which lists them; fp32 needs none."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}; known: {', '.join(CODECS)}")
    return CODECS[name]


def chunk_bounds(n: int, num_replicas: int) -> list[tuple[int, int]]:
    """(start, end) of each replica's chunk of [n]; sizes differ by at most 1, and are 0 for some when n < R."""
    return [(i * n // num_replicas, (i + 1) * n // num_replicas) for i in range(num_replicas)]


def chunk_stride(codec: Codec, n: int, num_replicas: int) -> int:
    """Bytes that a chunk takes in a message: the largest chunk's payload, rounded up to `ALIGNMENT`, never 0."""
    largest = -(-n // num_replicas)
    return max(-(-codec.payload_bytes(largest) // ALIGNMENT), 1) * ALIGNMENT


class CompressedSum:
    """One sum over the replicas, as one replica takes part in it. The caller makes the two collectives:

        message = CompressedSum(codec, flat, error, num_replicas, replica)
        received = all_to_all(message.to_owners)     # uint8 [R * stride], R equal parts
        own = message.sum_of_own_chunk(received)     # uint8 [stride]
        message.write_result(all_gather(own))        # R of them, in the order of the replicas

    flat      fp32 [n], this replica's contribution; scratch in between; the sum at the end
    error     fp32 [n], what earlier sums still owe; zeros before the first; changed in place, must last
    sends     False: this replica contributes nothing; zeros are sent, and what it owes stays for the next sum
    Without `sends`, flat may hold anything, NaN too.
    """

    def __init__(
        self, codec: Codec, flat: Tensor, error: Tensor, num_replicas: int, replica: int, *, sends: bool = True
    ) -> None:
        assert flat.shape == error.shape and flat.dim() == 1, (flat.shape, error.shape)
        self._codec, self._flat, self._error = codec, flat, error
        self._bounds, self._replica = chunk_bounds(flat.numel(), num_replicas), replica
        self._stride = chunk_stride(codec, flat.numel(), num_replicas)
        # Zeros: the unused ends of the chunks are the same bytes in every run.
        self.to_owners = torch.zeros(num_replicas * self._stride, dtype=torch.uint8, device=flat.device)
        if not sends:
            flat.zero_()
        else:
            flat.add_(error)
        for (start, end), payload in zip(self._bounds, self._split(self.to_owners), strict=True):
            codec.encode_(flat[start:end], payload)
            if sends:
                codec.decode(payload, error[start:end])
        if sends:
            torch.sub(flat, error, out=error)

    def sum_of_own_chunk(self, received: Tensor) -> Tensor:
        """The sum of this replica's chunk, encoded, uint8 [stride]. `received` uint8 [R * stride]: what all sent it."""
        start, end = self._bounds[self._replica]
        total, decoded = self._flat[start:end].zero_(), self._flat.new_empty(end - start)
        for payload in self._split(received):
            self._codec.decode(payload, decoded)
            total.add_(decoded)
        own = torch.zeros(self._stride, dtype=torch.uint8, device=received.device)
        self._codec.encode_(total, own)
        self._codec.decode(own, decoded)
        self._error[start:end].add_(total.sub_(decoded))
        return own

    def write_result(self, gathered: Sequence[Tensor]) -> None:
        """flat := the sum, from the chunks of all replicas, R of uint8 [stride]."""
        for (start, end), payload in zip(self._bounds, gathered, strict=True):
            self._codec.decode(payload, self._flat[start:end])

    def _split(self, message: Tensor) -> Sequence[Tensor]:
        """The chunks of a message, uint8 [stride] each."""
        return message.view(len(self._bounds), self._stride).unbind()
