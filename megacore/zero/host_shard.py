"""A bucket's shard in host memory: parameters and summed gradients (ZeRO-Infinity: Rajbhandari et al. 2021, arXiv
2104.07857, section 5.1, with host memory as the only further level).

The device holds a bucket's parameters only while a layer uses them. They are copied from pinned memory in a stream of
their own, and gathered from there, while the layer before computes. The sum of a microbatch's gradients goes back in
another stream while backward goes on. It is added to the microbatches' before on the device, and what the update
asks of gradients is computed on the device too, a bucket at a time: so the bits are those of a shard that stays there.
The host waits for nothing but what it reads itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacore.parallel import host_copies
from megacore.parallel.collectives import Pending, start_all_gather
from megacore.parallel.mesh import Group
from megacore.zero.exact_sums import UNIT, from_units


class HostStreams:
    """The streams in which a rank copies from and to host memory."""

    def __init__(self, device: torch.device) -> None:
        assert device.type != "cpu", "host and device are the same memory"
        # `downloads`: stream of copies to the host.
        # `uploads`: stream of copies to the device.
        self.device, self.uploads, self.downloads = device, torch.Stream(device), torch.Stream(device)
        self._held: tuple[torch.Event, Tensor] | None = None

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def noted(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.device)
        event.record(stream)
        return event

    def hold(self, tensor: Tensor, until: torch.Event) -> None:
        """Keep a tensor whose copy to the host is under way; none is held yet."""
        assert self._held is None
        self._held = until, tensor

    def release(self) -> None:
        """Free what is held: the stream that computes waits until it is copied."""
        if self._held is not None:
            self.current().wait_event(self._held[0])
            self._held = None


class HostShard:
    """This rank's shard of a bucket's parameters and of its gradients, in host memory. `parameters`: flat, in the
    format in which layers compute, pinned. `group`: the ranks that hold the other shards. `sum_dtype`: in which
    gradients are added up; integers are exact sums."""

    def __init__(self, parameters: Tensor, group: Group, streams: HostStreams, *, sum_dtype: torch.dtype) -> None:
        # `has_gradients`: whether a loss of this step has used the parameters.
        self.parameters, self.has_gradients = parameters, False
        self._group, self._streams = group, streams
        self._memory = torch.zeros(parameters.numel(), dtype=sum_dtype, pin_memory=True)
        self._gradients = self._memory
        self._uploaded: torch.Event | None = None  # the parameters: until then the host must not write them
        self._written: torch.Event | None = None  # the gradients: until then they must not be read

    # ---- parameters

    def start_gather(self, whole: Tensor) -> Pending:
        """Begin to copy the shard to the device, and to gather all shards there. `whole`: flat, of all shards, on the
        device. Nothing that is queued after this call may use it until `wait`."""
        streams = self._streams
        shard = whole if self._group.size == 1 else torch.empty_like(self.parameters, device=streams.device)
        streams.uploads.wait_stream(streams.current())  # for what used the memory before
        with streams.uploads:
            host_copies.to_device_(shard, self.parameters, "parameters")
            self._uploaded = uploaded = streams.noted(streams.uploads)
            if self._group.size > 1:
                gathering = start_all_gather(whole, shard, self._group)

        def arrive() -> None:
            nonlocal shard
            streams.current().wait_event(uploaded)
            if self._group.size > 1:
                gathering.wait()
            del shard

        return Pending(then=arrive)

    def on_device(self, elements: slice) -> Tensor:
        return host_copies.on_device(self.parameters[elements], self._streams.device, "parameters")

    def wait_for_reads(self) -> None:
        """Return once the host may write the parameters."""
        if self._uploaded is not None and not self._uploaded.query():
            self._uploaded.synchronize()
        self._uploaded = None

    # ---- gradients

    def begin_step(self) -> None:
        self._gradients, self.has_gradients = self._memory, False

    def add(self, gradients: Tensor) -> None:
        """Begin to add gradients to the sum, and to copy it to the host. `gradients`: flat, on the device; given
        away."""
        streams = self._streams
        streams.release()  # before more is fetched
        streams.downloads.wait_stream(streams.current())
        with streams.downloads:
            if self.has_gradients:
                gradients += host_copies.on_device(self._gradients, streams.device, "gradients")
            host_copies.to_host_(self._gradients, gradients, "gradients")
            self._written = streams.noted(streams.downloads)
        streams.hold(gradients, self._written)
        self.has_gradients = True

    def gradients(self, elements: slice) -> Tensor:
        assert self._written is not None
        self._streams.release()
        self._streams.current().wait_event(self._written)
        return host_copies.on_device(self._gradients[elements], self._streams.device, "gradients")

    def write(self, elements: slice, gradients: Tensor) -> None:
        host_copies.to_host_(self._gradients[elements], gradients, "gradients")
        self._written = self._streams.noted(self._streams.current())

    def convert_exact_sums(self) -> None:
        """Make exact sums fp32 gradients without the loss scale, in the same memory."""
        if self.has_gradients and self._gradients.dtype == torch.int64:
            converted = from_units(self.gradients(slice(None)), UNIT)
            self._gradients = self._memory.view(torch.float32)[: converted.numel()]
            self.write(slice(None), converted)

    def downloaded(self) -> Tensor:
        """The summed gradients in host memory, flat, once they are there."""
        if self._written is not None and not self._written.query():
            self._written.synchronize()
        return self._gradients

    @property
    def storages(self) -> list[Tensor]:
        return [self._memory]
