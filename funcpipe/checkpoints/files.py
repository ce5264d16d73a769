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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcpipe.checkpoints.optimizer import Written
from funcpipe.core.errors import CheckpointError, bullets

MANIFEST = "funcpipe.json"
_FORMAT = "funcpipe checkpoint 1"
_BLOCK = 2**20


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        step: as it was given.
        folder: where the files are, below the path.
        files: size and hash of each.
        model: the file of each tensor of the model, by name.
        tied: maps each further name of a tied parameter to its name in ``model``.
        moments: the file of each tensor of the optimizer, by key.
        optimizer: the optimizer's state and options, see `optimizer.Written`; None: not saved.
        format: of the manifest.
    """

    step: int
    folder: str
    files: dict[str, tuple[int, str]]
    model: dict[str, str]
    tied: dict[str, str]
    moments: dict[str, str]
    optimizer: Written | None = None
    format: str = _FORMAT

    def stored(self, names: Iterable[str]) -> list[str]:
        """Return the tensors of the model that have these names, each once."""
        return [*dict.fromkeys(key for name in names if (key := self.tied.get(name, name)) in self.model)]


def safetensors() -> tuple[Any, Any]:
    """The library for torch, and the one below it. Raises CheckpointError where it is not installed."""
    try:
        return pkgutil.resolve_name("safetensors.torch"), pkgutil.resolve_name("safetensors")
    except ImportError as error:
        raise CheckpointError("checkpoints are written with safetensors: pip install 'torch-funcpipe[io]'") from error


def unwritable(tensors: Mapping[str, Tensor]) -> list[str]:
    """Name the tensors that safetensors cannot write, a line for each. Writes nothing."""
    library = safetensors()[0]
    known: dict[torch.dtype, str] = {}
    faults: list[str] = []
    for name, tensor in tensors.items():
        if tensor.dtype not in known:
            try:
                library.save({"one": torch.zeros(1).to(tensor.dtype)})
                known[tensor.dtype] = ""
            except Exception as error:  # the error for an unknown type differs between versions of safetensors
                known[tensor.dtype] = f"safetensors has no {tensor.dtype} ({type(error).__name__})"
        if tensor.is_meta:
            faults.append(f"{name!r} is on the meta device and has no numbers; load or initialize it first")
        elif tensor.layout != torch.strided:
            faults.append(f"{name!r} is {tensor.layout}; safetensors has dense tensors only")
        elif known[tensor.dtype]:
            faults.append(f"{name!r}: {known[tensor.dtype]}")
    return faults


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> tuple[str, int, str]:
    """Write tensors into a file: its name, size and hash."""
    file = folder / name
    # safetensors refuses tensors that share memory, so each gets a copy.
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


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk. Without the flush a power cut may lose the names of written files."""
    if os.name == "posix":  # Windows cannot open folders
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def make_folder(folder: Path) -> None:
    """Make the folder of a checkpoint, and the missing folders above."""
    missing = [folder, *[above for above in folder.parents if not above.exists()]]
    folder.mkdir(parents=True)
    for made in missing:
        sync_folder(made.parent)


def commit(path: Path, manifest: Manifest) -> None:
    """Replace the manifest in one step, then remove the folder that it named before.

    The files of the new checkpoint must be on disk.
    """
    folder = path / manifest.folder
    total = sum(size for file, (size, _) in manifest.files.items() if file.startswith("model"))
    _write(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": manifest.model})
    _write(folder / MANIFEST, asdict(manifest))
    sync_folder(folder)
    before = _folder_of(path)
    os.replace(folder / MANIFEST, path / MANIFEST)
    sync_folder(path)  # the older checkpoint is removed only after the new manifest is on disk
    if before not in ("", manifest.folder):
        shutil.rmtree(path / before, ignore_errors=True)


def discard(path: Path, folder: str) -> None:
    """Remove the folder of a checkpoint, unless the manifest names it."""
    if _folder_of(path) != folder:
        shutil.rmtree(path / folder, ignore_errors=True)


def _folder_of(path: Path) -> str:
    """Return the folder that the manifest names, "" without one. `commit` removes no other folder."""
    try:
        folder = read_manifest(path).folder
    except CheckpointError:
        return ""
    return folder if folder.startswith("step-") and Path(folder).name == folder else ""


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


def read_tensors(path: Path, manifest: Manifest, wanted: Mapping[str, str]) -> dict[str, Tensor]:
    """Read tensors by name, given the file of each. Every file is checked before the first read.

    Raises:
        CheckpointError: a file is missing, or not what was written.
    """
    by_file: dict[str, list[str]] = {}
    for name, file in wanted.items():
        by_file.setdefault(file, []).append(name)
    faults = [fault for file in by_file if (fault := _fault(path / manifest.folder / file, manifest.files.get(file)))]
    if faults:
        raise CheckpointError(bullets(f"the checkpoint at {path} is damaged; load an older one:", faults))
    out: dict[str, Tensor] = {}
    for file, inside in by_file.items():
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
