"""What was done to prompts before the model saw them, by id. Takes JSON bytes, gives them back until newer ones need
the room."""

from __future__ import annotations

from collections import OrderedDict

from onebox.errors import NotFoundError

MAX_TRACES = 1000
MAX_BYTES = 64 * 2**20


class Traces:
    """The newest traces: at most `max_traces`, and `max_bytes` of them together."""

    def __init__(self, *, max_traces: int = MAX_TRACES, max_bytes: int = MAX_BYTES) -> None:
        self.max_traces, self.max_bytes = max_traces, max_bytes
        self.n_bytes = 0
        self._kept: OrderedDict[str, tuple[bytes, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, id: str, trace: bytes, owner: str = "") -> None:
        """Keeps a trace for its owner; one that is larger than the whole store is not kept, and the others stay."""
        if len(trace) > self.max_bytes or self.max_traces < 1:
            return
        self.n_bytes += len(trace) - len(self._kept.pop(id, (b"", ""))[0])
        self._kept[id] = trace, owner
        while len(self._kept) > self.max_traces or self.n_bytes > self.max_bytes:
            self.n_bytes -= len(self._kept.popitem(last=False)[1][0])

    def get(self, id: str, owner: str = "") -> bytes:
        """Raises NotFoundError, for another's trace too."""
        trace, whose = self._kept.get(id, (b"", None))
        if whose != owner:
            raise NotFoundError(f"No trace '{id[:100]}': it was never made, or newer ones took its room.", param="id")
        return trace
