"""Private parts of Python's process pools."""

from concurrent.futures import ProcessPoolExecutor


def stop_feeding(pool: ProcessPoolExecutor) -> None:
    """Let a broken pool end although a killed worker has left tasks in its pipe.

    Python 3.11 before 3.11.5 waits forever for the thread that writes tasks to it (CPython's issue 94777).
    """
    pool._call_queue._reader.close()  # type: ignore[attr-defined]
