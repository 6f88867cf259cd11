"""The rate of a disk for parallel writes and reads of large files."""

import contextlib
import errno
import mmap
import os
import pathlib
import threading
import time

BLOCK = 4 << 20
PAGE = 4096


def drop_page_cache():
    """Makes later reads come from the disk; root can do that for all files. True when it worked."""
    os.sync()
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
        return True
    except OSError:
        return False


class Disk:
    """Files of one folder, one for each thread, with `size` bytes in all."""

    def __init__(self, folder, threads, size):
        self.paths = [pathlib.Path(folder) / f"disk-{index}" for index in range(threads)]
        self.file_bytes = max(BLOCK, size // threads // BLOCK * BLOCK)
        self.random = os.urandom(BLOCK)

    def remove(self):
        for path in self.paths:
            path.unlink(missing_ok=True)

    def write(self, direct):
        """Bytes a second until everything is synced."""
        self.remove()
        return self._rate(self._write_file, direct)

    def read(self, direct):
        """Bytes a second of files that `write` left."""
        for path in self.paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        drop_page_cache()
        return self._rate(self._read_file, direct)

    def _rate(self, work, direct):
        failures = []

        def run(path):
            try:
                work(path, os.O_DIRECT if direct else 0)
            except OSError as error:
                failures.append(error)

        began = time.monotonic()
        threads = [threading.Thread(target=run, args=(path,)) for path in self.paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        if failures:
            raise failures[0]
        return self.file_bytes * len(self.paths) / seconds

    def _write_file(self, path, flags):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o644)
        try:
            with contextlib.suppress(OSError):  # some file systems cannot reserve space
                os.posix_fallocate(descriptor, 0, self.file_bytes)
            with mmap.mmap(-1, BLOCK) as block:  # starts at a page
                block[:] = self.random
                for offset in range(0, self.file_bytes, BLOCK):
                    done = 0
                    while done < BLOCK:
                        with memoryview(block) as view, view[done:] as rest:
                            done += os.pwrite(descriptor, rest, offset + done)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read_file(self, path, flags):
        descriptor = os.open(path, os.O_RDONLY | flags)
        try:
            with mmap.mmap(-1, BLOCK) as block:
                for offset in range(0, self.file_bytes, BLOCK):
                    with memoryview(block) as view:
                        if os.preadv(descriptor, [view], offset) != BLOCK:
                            raise OSError(errno.EIO, f"{path} ends early")
        finally:
            os.close(descriptor)


def rates(folder, threads, size, probe):
    """{"write": bytes a second, "read": ..., "write_mode": "direct" or "cached", ...}: the faster way of a probe of
    `probe` bytes, measured with `size` bytes."""
    result = {}
    small, large = Disk(folder, threads, min(probe, size)), Disk(folder, threads, size)
    try:
        for what in ("write", "read"):
            found = {}
            for mode, direct in (("direct", True), ("cached", False)):
                try:
                    found[mode] = getattr(small, what)(direct)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise  # EINVAL: this file system has no direct transfers
            result[f"{what}_probe"] = found
            result[f"{what}_mode"] = max(found, key=found.get)
        small.remove()
        for what in ("write", "read"):
            result[what] = getattr(large, what)(result[f"{what}_mode"] == "direct")
    finally:
        small.remove()
        large.remove()
    return result
