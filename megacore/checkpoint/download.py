"""A checkpoint of an object store in a local directory, for what reads all of it several times."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megacore.checkpoint.directory import MANIFEST_NAME
from megacore.checkpoint.files import TOKENIZER_DIRECTORY, verify
from megacore.checkpoint.manifest import find_checkpoint, read_manifest
from megacore.config.optimizers import EMA
from megacore.errors import CheckpointError
from megacore.progress import Progress
from megacore.remote import is_url, usable

_STATE_OF_THE_MODEL = ("model", "buffers", EMA.name)
_CHUNK = 8 << 20  # bytes


@contextlib.contextmanager
def local_checkpoint(given: str, beside: Path) -> Iterator[Path]:
    """Give the path of a checkpoint or a run: the given one, or of a verified copy of a URL in the directory `beside`,
    which ends with the block and has none of the optimizer's state. Raises UserError where the URL cannot be read,
    CheckpointError where it holds no whole checkpoint."""
    if not is_url(given):
        yield Path(given)
        return
    source = find_checkpoint(usable(given))
    manifest = read_manifest(source)
    left_out = manifest.files_of() - manifest.files_of(_STATE_OF_THE_MODEL)
    names = [name for name in manifest.files if name not in left_out]
    scratch = Path(tempfile.mkdtemp(prefix=".checkpoint.tmp-", dir=beside))
    try:
        copy = scratch / source.name
        (copy / TOKENIZER_DIRECTORY).mkdir(parents=True)
        total = sum(manifest.files[name].bytes for name in names)
        with Progress(f"downloading {source.name}", total) as progress:
            for name in (*names, MANIFEST_NAME):
                with (source / name).open("rb") as file, (copy / name).open("xb") as out:
                    while chunk := file.read(_CHUNK):
                        out.write(chunk)
                        progress.advance(len(chunk))
        for name in names:
            verify(copy / name, manifest.files[name])
        yield copy
    except OSError as error:
        raise CheckpointError(f"{error.filename or source}: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
