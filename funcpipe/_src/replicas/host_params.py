"""Parameters at home in host memory: a device has them only while their stage computes.

U copies a stage's parameters to the device, on a stream beside the lane's own stream. G copies the
gradients to host memory and frees them on the device. S steps the parameters in host memory. This
is how RoundPipe (arXiv 2604.27085) trains models that are larger than a device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.border import fills
from funcpipe._src.core.plain_tensors import is_plain
from funcpipe._src.core.tree import Tree, flatten, locations
from funcpipe._src.devices.host_link import HostStream
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.mail import Mailbox
from funcpipe._src.replicas.gathered import GatheredParams, hollow_like
from funcpipe._src.replicas.replicas import Reduction


def at_home(leaf: Any, device: torch.device) -> bool:
    """Return whether a leaf is in host memory, while its stage runs on another device."""
    return isinstance(leaf, Tensor) and leaf.is_cpu and not Place.backend.lies_on(leaf, device)


def refuse_odd(tree: Tree, root: str, device: torch.device) -> list[str]:
    """Describe the leaves at home that cannot be gathered."""
    rows = zip(locations(tree, root), flatten(tree)[0], strict=True)
    return [
        f"{name} is a {type(leaf).__name__} ({leaf.layout})"
        for name, leaf in rows
        if at_home(leaf, device) and not is_plain(leaf)
    ]


class HostParams(GatheredParams):
    """The parameters of a stage, some of them at home in host memory, for one run."""

    def __init__(self, stage: int, tree: Tree, device: torch.device) -> None:
        super().__init__(stage, tree)
        self._out: HostStream | None = None
        made: dict[int, Tensor] = {}  # a tensor that appears twice stays one tensor
        for number, leaf in enumerate(self.given):
            if at_home(leaf, device):
                if id(leaf) not in made:
                    made[id(leaf)] = hollow_like(leaf, device)
                    self.hollow.append(number)
                self.leaves[number] = made[id(leaf)]
        self.is_home = [at_home(leaf, device) for leaf in self.given]

    def _gather(self, box: Mailbox, place: Place) -> None:
        self._out = self._out or HostStream(place, out=True)
        stream = place.named("home", place.device)
        if all(stream is not each for each in place.copy_streams):
            place.copy_streams.append(stream)
        # The memory comes from the pool of the lane's stream, which may still use it.
        stream.wait_event(place.event())
        with torch.no_grad(), place.module.stream(stream):
            for number in self.hollow:
                # By ``.data``, so that autograd does not see a write: the numbers are the same as
                # in the last gather, and graphs may have saved the tensor.
                place.backend.fill(self.leaves[number].data, self.given[number].detach())
        self._copied = place.module.Event()
        self._copied.record(stream)

    def _await(self, box: Mailbox, place: Place) -> None:
        place.wait(self._copied)

    def reduce(self, gradients: list[Tensor | None], reduction: Reduction) -> None:
        """Begin to copy the gradients to host memory, and free them on the device."""
        home: list[Tensor | None] = [*gradients]
        dense: dict[int, Tensor] = {}
        for number, gradient in enumerate(gradients):
            if gradient is None or not self.is_home[number]:
                continue
            if gradient.is_sparse or self._out is None:
                home[number] = gradient.cpu()
            else:
                dense[number] = gradient if fills(gradient) else gradient.contiguous()
        event = None
        if self._out is not None and dense:
            flat = [each.as_strided((each.numel(),), (1,)) for each in dense.values()]
            copies, event = self._out.copy(flat)
            for (number, gradient), copy in zip(dense.items(), copies, strict=True):
                home[number] = copy.as_strided(gradient.size(), gradient.stride())
                self._out.place.backend.shrink(gradient)

        def give() -> list[Tensor | None]:
            if event is not None:
                event.synchronize()
            return home

        reduction.deliver(give)
