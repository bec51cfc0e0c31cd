"""Numbers and lines as people read them, the same on the console, on the pages and in tables."""

import textwrap


def format_count(value: float) -> str:
    """Return a count with three significant digits and a unit: 940, 12.4k, 3.28M, 1.05B, 2.10T."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        # 0.9995: a value that rounds to 1000 of the smaller unit is one of the larger.
        if abs(value) >= 0.9995 * factor:
            scaled = value / factor
            if abs(scaled) >= 1e6:
                return f"{value:.2e}"
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{value:.0f}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 rank, 4,096 ranks."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_duration(seconds: float) -> str:
    """Return a time span in its two largest units: 42s, 3m 05s, 2h 10m, 4d 03h."""
    whole = int(round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    if whole >= 36_525 * 86400:
        return f"{seconds / 86400:.1e} days"
    return f"{whole // 86400:,}d {whole % 86400 // 3600:02d}h"


def format_value(value: float | None, unit: str) -> str:
    """Return a number by its unit; a dash when there is none.

    number 3.412, tenths 1,204.5, share 74.2%, gain +0.0213, points +2.31 pts, count 12.4k,
    rate 5.0e-4, duration 3m 05s, bytes 1.42 GiB.
    """
    if value is None:
        return "–"
    if unit == "duration":
        return format_duration(value)
    if unit == "bytes":
        return f"{value / 2**30:,.2f} GiB" if value >= 2**28 else f"{value / 2**20:,.0f} MiB"
    if unit == "rate":
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−") if value else "0"
    if unit == "count" or abs(value) >= 1e6:  # no column is wide enough for more digits
        return format_count(value).replace("-", "−")
    gain = f"{value:+.4f}" if abs(value) >= 5e-5 else "0"
    text = {"tenths": f"{value:,.1f}", "share": f"{100 * value:.1f}%", "gain": gain,
            "points": f"{100 * value:+.2f} pts"}.get(unit, f"{value:.3f}")
    return text.replace("-", "−")


def fill(text: str, width: int, hanging: int = 0) -> str:
    """Return a text in lines of `width`, all but the first indented; no word is cut."""
    return textwrap.fill(text, width, subsequent_indent=" " * hanging, break_long_words=False,
                         break_on_hyphens=False)
