"""Numbers, times and sizes as text."""

MIB = 2**20


def as_number(value: float) -> str:
    """Text of a number with four significant digits, from 1,000 on with all before the point, e.g. ``17,724``."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:,.4g}"


def as_count(number: float, noun: str) -> str:
    """Text of a number of things, e.g. ``1 step`` or ``2,400 steps``.

    Args:
        number: how many; infinity where it is not known.
        noun: the thing, in the singular; its plural ends in ``s``.
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def as_time(seconds: float) -> str:
    """Text of a time with its two largest units, e.g. ``1 h 5 min``."""
    whole = round(seconds)
    for unit, size, below, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def as_size(size: float) -> str:
    """Text of a number of bytes, e.g. ``1.2 GiB``."""
    return f"{size / MIB:,.0f} MiB" if size < 1024 * MIB else f"{size / MIB / 1024:,.1f} GiB"
