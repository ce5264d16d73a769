"""The files of a checkpoint: safetensors in a folder of their own, and a manifest that is put in its place last.

``path/funcpipe.json`` names the folder of the newest whole checkpoint, its files with their sizes and hashes, and the
file of each tensor. It is replaced in one step when everything else is written, so a process that is killed leaves the
one before. Beside the tensors lies the index by which transformers finds them.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from funcpipe.core.errors import CheckpointError, bullets

MANIFEST = "funcpipe.json"
_FORMAT = "funcpipe checkpoint 1"
_BLOCK = 2**20


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        step: as it was given.
        folder: where the files are, below the path.
        files: size and hash of each.
        tensors: the file of each tensor.
        groups: of the optimizer: its options, and the names of its parameters.
        numbers: what the optimizer keeps for a parameter besides tensors, by name.
        optimizer: the name of its class.
        format: of the manifest.
    """

    step: int
    folder: str
    files: dict[str, tuple[int, str]]
    tensors: dict[str, str]
    groups: list[dict[str, Any]] | None = None
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    optimizer: str = ""
    format: str = _FORMAT


def safetensors() -> tuple[Any, Any]:
    """The library for torch, and the one below it. Raises CheckpointError where it is not installed."""
    try:
        return pkgutil.resolve_name("safetensors.torch"), pkgutil.resolve_name("safetensors")
    except ImportError as error:
        raise CheckpointError("checkpoints are written with safetensors: pip install 'torch-funcpipe[io]'") from error


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> tuple[str, int, str]:
    """Write tensors into a file: its name, size and hash."""
    file = folder / name
    whole = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    safetensors()[0].save_file(whole, file, metadata={"format": "pt"})
    with open(file, "rb+") as written:
        os.fsync(written.fileno())
    return name, file.stat().st_size, digest(file)


def digest(file: Path) -> str:
    """The hash of a file."""
    state = hashlib.blake2b(digest_size=16)
    with open(file, "rb") as opened:
        while block := opened.read(_BLOCK):
            state.update(block)
    return state.hexdigest()


def commit(path: Path, manifest: Manifest) -> None:
    """Put a manifest in its place, in one step; then nobody needs the folders of others."""
    weights = {name: file for name, file in manifest.tensors.items() if file.startswith("model")}
    total = sum(size for file, (size, _) in manifest.files.items() if file.startswith("model"))
    _write(
        path / manifest.folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weights},
    )
    beside = path / f"{MANIFEST}.{manifest.folder}"
    _write(beside, asdict(manifest))
    os.replace(beside, path / MANIFEST)
    for other in path.glob("step-*"):
        if other.name != manifest.folder and other.is_dir():
            shutil.rmtree(other, ignore_errors=True)
    for other in path.glob(f"{MANIFEST}.*"):
        other.unlink(missing_ok=True)


def _write(file: Path, what: Any) -> None:
    with open(file, "w") as opened:
        json.dump(what, opened, indent=1)
        opened.flush()
        os.fsync(opened.fileno())


def read_manifest(path: Path) -> Manifest:
    """The manifest of the newest whole checkpoint. Raises CheckpointError: there is none, or it is of others."""
    file = path / MANIFEST
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        what = "there is no such folder" if not path.is_dir() else f"it has no {MANIFEST}: no save into it was finished"
        raise CheckpointError(f"there is no checkpoint at {path}: {what}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint at {path} is damaged: {MANIFEST} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise CheckpointError(f"{file} is of another program or version; this one reads {_FORMAT!r}")
    try:
        found["files"] = {name: (int(size), str(hash_)) for name, (size, hash_) in found["files"].items()}
        return Manifest(**found)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint at {path} is damaged: {MANIFEST} lacks something: {error}") from None


def read_tensors(path: Path, manifest: Manifest, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors by name; files are checked before anything is read from them.

    Raises:
        CheckpointError: a file is missing, or not what was written.
    """
    wanted: dict[str, list[str]] = {}
    for name in names:
        wanted.setdefault(manifest.tensors[name], []).append(name)
    faults = [fault for file in wanted if (fault := _fault(path / manifest.folder / file, manifest.files.get(file)))]
    if faults:
        raise CheckpointError(bullets(f"the checkpoint at {path} is damaged; load an older one:", faults))
    out: dict[str, Tensor] = {}
    for file, inside in wanted.items():
        with safetensors()[1].safe_open(path / manifest.folder / file, framework="pt") as opened:
            out.update({name: opened.get_tensor(name) for name in inside})
    return out


def _fault(file: Path, known: Sequence[Any] | None) -> str:
    """What is wrong with a file; "": nothing."""
    if known is None or not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != known[0]:
        return f"{file.name} has {file.stat().st_size} bytes, and {known[0]} were written"
    return "" if digest(file) == known[1] else f"{file.name} has other bytes than were written"
