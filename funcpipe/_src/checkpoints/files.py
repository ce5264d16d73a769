"""The files of a checkpoint: safetensors in a folder, and a manifest that is replaced last.

The manifest ``path/funcpipe.json`` names the folder of the current checkpoint, its files with sizes
and hashes, and the file of each tensor. The manifest is replaced in one step after all other files
are on disk. So if the process is killed, the previous checkpoint stays valid. The folder also has
an index for transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import CheckpointError, raise_all

MANIFEST = "funcpipe.json"
_FORMAT = "funcpipe checkpoint 1"

Files = dict[str, tuple[int, str]]  # size and hash of each file, by name


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint."""

    step: int
    folder: str  # the folder of the files, within the path
    files: Files
    model: dict[str, str]  # the file of each tensor of the model, by name
    tied: dict[str, str]  # maps each further name of a tied parameter to its name in `model`
    moments: dict[str, str]  # the file of each tensor of the optimizer, by key
    optimizer: dict[str, Any] | None = None  # see `optimizer.Written`; None: not saved
    format: str = _FORMAT


def safetensors() -> Any:
    """Return the library. Raises CheckpointError if it, or numpy, is not installed."""
    try:
        pkgutil.resolve_name("numpy")  # safetensors writes tensors of torch by way of numpy
        return pkgutil.resolve_name("safetensors.torch")
    except ImportError as error:
        raise CheckpointError(
            "fp.save and fp.load need safetensors and numpy, and one of them is not installed; "
            f"call pip install safetensors numpy ({error})"
        ) from error


def unwritable(tensors: Mapping[str, Tensor]) -> list[str]:
    """Name the tensors that safetensors cannot write, a line for each. Writes nothing."""
    library = safetensors()
    faults: list[str] = []
    for name, tensor in tensors.items():
        if tensor.is_meta:
            faults.append(
                f"{name!r} is on the meta device and has no numbers; load or initialize it first"
            )
        elif tensor.layout != torch.strided:
            faults.append(f"{name!r} is {tensor.layout}; safetensors has dense tensors only")
        else:
            try:
                library.save({name: torch.zeros(1).to(tensor.dtype)})
            except Exception as error:  # which error depends on the version of safetensors
                faults.append(
                    f"{name!r}: safetensors has no {tensor.dtype} ({type(error).__name__})"
                )
    return faults


def make_folder(folder: Path) -> None:
    """Make the folder of a checkpoint, and the missing folders above."""
    missing = [folder, *[above for above in folder.parents if not above.exists()]]
    folder.mkdir(parents=True)
    for made in missing:
        _sync_folder(made.parent)


def write_files(folder: Path, rows: Mapping[str, Mapping[str, Tensor]]) -> Files:
    """Write tensors, given by file and name, and wait until the files are on disk."""
    files: Files = {}
    for name, tensors in rows.items():
        if tensors:
            # safetensors refuses tensors that share memory, so each gets a copy.
            whole = {
                key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()
            }
            path = folder / name
            path.touch()  # with the permissions of the umask; safetensors takes all but the owner's
            mode = path.stat().st_mode
            safetensors().save_file(whole, path, metadata={"format": "pt"})
            path.chmod(mode)
            with open(path, "rb+") as written:
                os.fsync(written.fileno())
            files[name] = (path.stat().st_size, _hash(path))
    _sync_folder(folder)
    return files


def commit(path: Path, manifest: Manifest) -> None:
    """Replace the manifest in one step, then remove the folder that it named before.

    The files of the new checkpoint must be on disk.
    """
    folder = path / manifest.folder
    total = sum(size for file, (size, _) in manifest.files.items() if file.startswith("model"))
    index = {"metadata": {"total_size": total}, "weight_map": manifest.model}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / MANIFEST, asdict(manifest))
    _sync_folder(folder)
    before = _folder_of(path)
    os.replace(folder / MANIFEST, path / MANIFEST)
    _sync_folder(path)  # the older checkpoint is removed only after the new manifest is on disk
    if before not in ("", manifest.folder):
        shutil.rmtree(path / before, ignore_errors=True)


def discard(path: Path, folder: str) -> None:
    """Remove the folder of a checkpoint, unless the manifest names it."""
    if _folder_of(path) != folder:
        shutil.rmtree(path / folder, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest. Raises CheckpointError if it is missing, damaged or of another
    version."""
    file = path / MANIFEST
    damaged = f"the checkpoint at {path} is damaged: {MANIFEST}"
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        why = "there is no such folder"
        if path.is_dir():
            why = f"it has no {MANIFEST}: no save into it was finished"
        raise CheckpointError(f"there is no checkpoint at {path}: {why}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{damaged} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise CheckpointError(
            f"{file} was written by another program or version; this version reads {_FORMAT!r}"
        )
    try:
        manifest = Manifest(**found)
        return replace(
            manifest, files={name: (size, known) for name, (size, known) in manifest.files.items()}
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{damaged} lacks something: {error}") from None


def read_tensors(path: Path, manifest: Manifest, wanted: Mapping[str, str]) -> dict[str, Tensor]:
    """Read tensors by name, given the file of each. Every file is checked before the first read.

    Raises:
        CheckpointError: a file is missing, or differs from the file that was written.
    """
    files = [*dict.fromkeys(wanted.values())]
    folder = path / manifest.folder
    faults = [fault for file in files if (fault := _fault(folder / file, manifest.files.get(file)))]
    title = (
        f"the checkpoint at {path} is damaged, and fp.save keeps only the newest one; load a copy "
        "from another path:"
    )
    raise_all(title, faults, CheckpointError)
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safetensors().safe_open(folder / file, framework="pt") as opened:
            own = [name for name, where in wanted.items() if where == file]
            tensors.update({name: opened.get_tensor(name) for name in own})
    return tensors


def _fault(file: Path, known: tuple[int, str] | None) -> str:
    """Return the fault of a file, or ""."""
    if known is None or not file.is_file():
        return f"{file.name} is missing"
    size, hash_ = known
    if file.stat().st_size != size:
        return f"{file.name} has {file.stat().st_size} bytes, but {size} were written"
    return "" if _hash(file) == hash_ else f"{file.name} has other contents than were written"


def _hash(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _folder_of(path: Path) -> str:
    """Return the folder that the manifest names, "" without one. `commit` removes no other
    folder."""
    try:
        folder = read_manifest(path).folder
    except CheckpointError:
        return ""
    return folder if folder.startswith("step-") and Path(folder).name == folder else ""


def _write_json(file: Path, value: Any) -> None:
    with open(file, "w") as opened:
        json.dump(value, opened, indent=1)
        opened.flush()
        os.fsync(opened.fileno())


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk. A power cut may lose the names of written files
    otherwise."""
    if os.name == "posix":  # Windows cannot open folders
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
