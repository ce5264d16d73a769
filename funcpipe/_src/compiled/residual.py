"""The values that a program keeps for a later program: F for its backward, I for W."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from funcpipe._src.compiled.programs import Programs
from funcpipe._src.core.border import fills
from funcpipe._src.core.plain_tensors import address, is_plain
from funcpipe._src.data.result import Loss
from funcpipe._src.devices.host_link import HostStream


@dataclass(slots=True, eq=False)
class ProgramResidual:
    """Tensors in a list, which the later program empties."""

    values: list[Tensor]
    programs: Programs  # the programs that made them
    microbatch: int
    # The losses of the forward; their weights scale the gradients.
    loss: Loss | None = None
    side: tuple[Any, Any] | None = None
    missing: frozenset[int] = frozenset()  # the roots that had no gradient in I
    # Shape and strides of the tensors that are on the host, by number.
    _away: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    _event: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors on the device. Shared memory counts once."""
        here = [tensor for number, tensor in enumerate(self.values) if number not in self._away]
        return sum({address(tensor): tensor.untyped_storage().nbytes() for tensor in here}.values())

    def move(self, to: HostStream, *, fixed: frozenset[int] = frozenset()) -> Any:
        """Move the tensors to the host or back, except memory at the fixed addresses.

        Returns:
            The event after which the tensors are there. None: they are there already.
        """
        if not to.out:
            copies, event = to.copy([self.values[number] for number in self._away], self._event)
            for (number, form), copy in zip(self._away.items(), copies, strict=True):
                self.values[number] = copy.as_strided(*form)
            self._away, self._event = {}, None
            return event
        moving = {
            number: tensor
            for number, tensor in enumerate(self.values)
            if is_plain(tensor)
            and tensor.numel()
            and fills(tensor)
            and to.takes(tensor)
            and address(tensor) not in fixed
        }
        # Move flat memory. Shape and strides are applied again when the tensor comes back.
        copies, self._event = to.copy(
            [tensor.as_strided((tensor.numel(),), (1,)) for tensor in moving.values()]
        )
        self._away = {number: (tensor.shape, tensor.stride()) for number, tensor in moving.items()}
        for number, copy in zip(moving, copies, strict=True):
            self.values[number] = copy
        return self._event
