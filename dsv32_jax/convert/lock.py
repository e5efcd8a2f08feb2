"""One conversion at a time in a local folder."""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from dsv32_jax import errors
from dsv32_jax.convert import journal, storage
from dsv32_jax.convert.workers import Workers

logger = logging.getLogger(__name__)

FILE = "lock"
WITHOUT_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK})  # some network file systems


@contextlib.contextmanager
def held(target: epath.Path, workers: Workers) -> Iterator[None]:
    """Keep other conversions out of a folder in the `with` block; a killed process's hold ends with it.

    Of processes that share the work the first one holds the folder for all; a bucket is not held.

    Args:
        target: The conversion's result; made if need be, and not left behind empty.
        workers: This process.

    Raises:
        UsageError: If another conversion holds it.
        OSError: If the storage refuses.
    """
    if storage.is_remote(target) or not workers.is_first:
        yield
        return
    folder = Path(target) / journal.FOLDER
    made = [path for path in (folder, folder.parent) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder / FILE, target):
            yield
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # not empty, so it is wanted
                path.rmdir()


@contextlib.contextmanager
def _locked(path: Path, target: epath.Path) -> Iterator[None]:
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have removed the file since it was opened here.
            is_own = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_own = False
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            logger.warning("no other conversion is kept out of %s: %s", target, error.strerror)
            is_own = True
        if not is_own:
            raise errors.UsageError(f"another conversion is at work in {target}")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
