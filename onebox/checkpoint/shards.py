"""Folders of safetensors files. Takes a path, gives checked headers and tensors; nothing is trusted.

Tensors are read by position into memory of their own and the page cache is given back: on unified memory the page
cache is the accelerator's memory.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from onebox.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # the format's own limit
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: bytes [start, start + nbytes) of `file`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def parse_json(text: str | bytes, source: str) -> Any:
    """JSON in which no object names a key twice. Raises CheckpointError naming `source`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{source}: {twice!r} is named twice; the file is damaged.")
        return result

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source}: not readable as JSON ({error}); the file is damaged.") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file whose top is an object."""
    try:
        size = _regular_size(path)
        if size > MAX_HEADER:
            raise CheckpointError(f"{path}: {size} bytes, at most {MAX_HEADER} were expected; the file is damaged.")
        value = parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def _regular_size(path: Path) -> int:
    """Bytes of a file; a pipe or a device would be read for ever."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: {'a folder' if stat.S_ISDIR(found.st_mode) else 'no regular file'}; refused.")
    return found.st_size


def read_header(path: Path) -> list[TensorInfo]:
    """Every tensor of one safetensors file, in file order.

    Raises CheckpointError naming file and tensor when the header is not exactly what the file's bytes can hold: cut
    short, gaps or overlaps between tensors, sizes that do not follow from dtype and shape, names given twice.
    """
    try:
        size = _regular_size(path)
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if length < 2 or length > min(MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{path}: header of {length} bytes in a file of {size} bytes; the file is cut short or damaged."
                )
            header = parse_json(file.read(length), f"{path} (header)")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is no JSON object; the file is damaged.")
    base = 8 + length
    infos = [_tensor_info(path, name, entry, base) for name, entry in header.items() if name != "__metadata__"]
    infos.sort(key=lambda info: (info.start, info.nbytes))
    end = base
    for info in infos:
        if info.start != end:
            what = "overlaps the tensor before it" if info.start < end else f"leaves a gap of {info.start - end} bytes"
            raise CheckpointError(f"{path}: tensor {info.name!r} {what}; the header is damaged.")
        end = info.start + info.nbytes
        if end > size:
            raise CheckpointError(
                f"{path}: tensor {info.name!r} ends at byte {end} of a file of {size} bytes; "
                "the file is cut short: fetch it again."
            )
    if end != size:
        raise CheckpointError(f"{path}: {size - end} bytes belong to no tensor; the file is damaged.")
    return infos


def _tensor_info(path: Path, name: str, entry: object, base: int) -> TensorInfo:
    def bad(finding: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r}: {finding}; the header is damaged.")

    if not isinstance(entry, dict):
        raise bad("its entry is no JSON object")
    dtype = entry.get("dtype")
    shape: object = entry.get("shape")
    offsets: object = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad(f"dtype {dtype!r} is not known")
    if not _whole_numbers(shape):
        raise bad(f"shape {shape!r} is no list of sizes")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise bad(f"data_offsets {offsets!r} are no range of bytes")
    count = 1
    for n in shape:
        count *= n
    nbytes = count * DTYPES[dtype].itemsize
    if nbytes != offsets[1] - offsets[0]:
        raise bad(f"{dtype} {shape} takes {nbytes} bytes, data_offsets hold {offsets[1] - offsets[0]}")
    return TensorInfo(name, path, dtype, tuple(shape), base + offsets[0], nbytes)


def _whole_numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


@dataclass
class Shards:
    """All tensors of a checkpoint folder by stored name, and the open files they are read from."""

    path: Path
    tensors: dict[str, TensorInfo]
    side_files: tuple[str, ...] = ()
    _open: dict[Path, int] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        is_mtp: Callable[[str], bool],
        wanted: Callable[[str], bool] | None = None,
    ) -> Shards:
        """Read and check every header of the folder; with `wanted`, of the indexed files that hold a wanted tensor.

        Files that the index does not name may hold only tensors for which `is_mtp(name)` is true; so may extra tensors
        in files that it does name. Raises CheckpointError naming the file and the tensor at fault.
        """
        if not path.is_dir():
            found = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path}: {found}; expected a checkpoint folder.")
        files = sorted(f.name for f in path.glob("*.safetensors"))
        index = path / INDEX
        if index.exists():
            weight_map = _weight_map(index)
        elif SINGLE in files:
            weight_map = {info.name: SINGLE for info in read_header(path / SINGLE)}
        elif files:
            raise CheckpointError(f"{path}: {len(files)} safetensors files but no {INDEX}; the folder is incomplete.")
        else:
            raise CheckpointError(f"{path}: no safetensors files; is this a checkpoint folder?")
        if wanted is not None:
            needed = {file for tensor, file in weight_map.items() if wanted(tensor)}
            weight_map = {tensor: file for tensor, file in weight_map.items() if file in needed}
        named = sorted(set(weight_map.values()))
        tensors: dict[str, TensorInfo] = {}
        for name in named:
            if name not in files:
                missing = next(t for t, f in weight_map.items() if f == name)
                raise CheckpointError(f"{path / name}: the file is missing, the index expects {missing!r} in it.")
        side = tuple(name for name in files if name not in named) if wanted is None else ()
        for name in (*named, *side):
            for info in read_header(path / name):
                if weight_map.get(info.name) != name and not is_mtp(info.name):
                    where = (
                        f"the index places it in {weight_map[info.name]}"
                        if info.name in weight_map
                        else ("the index does not name it")
                    )
                    raise CheckpointError(f"{path / name}: holds tensor {info.name!r}, but {where}.")
                if info.name in tensors:
                    other = tensors[info.name].file.name
                    raise CheckpointError(f"{path / name}: tensor {info.name!r} is in {other} too.")
                tensors[info.name] = info
        for tensor, name in weight_map.items():
            if tensor not in tensors or tensors[tensor].file.name != name:
                raise CheckpointError(f"{path / name}: tensor {tensor!r} is in the index but not in the file.")
        return cls(path, tensors, side)

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        info = self.tensors[name]
        out = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill contiguous `out`, of the tensor's dtype and size, from the file."""
        info = self.tensors[name]
        assert out.is_contiguous() and out.numel() * out.element_size() == info.nbytes, name
        if info.nbytes == 0:
            return
        self._fill(info, _view(out))

    def read_part(self, name: str, first: int, shape: tuple[int, ...]) -> Tensor:
        """Consecutive elements of a tensor, from its `first`, as `shape`."""
        info = self.tensors[name]
        out = torch.empty(shape, dtype=DTYPES[info.dtype])
        self._fill(info, _view(out), first * out.element_size())
        return out

    def read_bytes(self, name: str, start: int, count: int) -> bytearray:
        """Bytes [start, start + count) of a tensor."""
        data = bytearray(count)
        self._fill(self.tensors[name], memoryview(data), start)
        return data

    def _fill(self, info: TensorInfo, view: memoryview, offset: int = 0) -> None:
        fd = self._open.get(info.file)
        try:
            if fd is None:
                fd = self._open[info.file] = os.open(info.file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            done, start = 0, info.start + offset
            while done < len(view):
                count = os.preadv(fd, [view[done : done + (1 << 30)]], start + done)
                if count == 0:
                    raise CheckpointError(f"{info.file}: ended inside tensor {info.name!r}; the file is cut short.")
                done += count
        except OSError as error:
            raise CheckpointError(f"{info.file}: tensor {info.name!r}: {error.strerror or error}.") from None
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, start, len(view), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _view(out: Tensor) -> memoryview:
    return out.reshape(-1).view(torch.uint8).numpy().data


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: 'weight_map' must be an object of tensor names and files; the file is damaged."
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or name != os.path.basename(name):
            raise CheckpointError(
                f"{index}: tensor {tensor!r}: {name!r} is no safetensors file of this folder; refused."
            )
    return weight_map


def header_bytes(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that holds these tensors in this order, length prefix included, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, dtype, shape in tensors:
        nbytes = dtype.itemsize
        for n in shape:
            nbytes *= n
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, start + nbytes],
        }
        start += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
