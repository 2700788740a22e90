#!/usr/bin/env python3
"""Draws docs/ladder.svg from the denoise tables of RESULTS.md.

Usage: docs/ladder.py
"""
import pathlib
import re

HERE = pathlib.Path(__file__).parent
PROBLEM = "denoise/loop/pi05_s50_p968_steps10_bf16"
WIDTH, LEFT, SCALE, ROW, TOP = 860, 250, 14.0, 30, 62


def rows():
    """(name, milliseconds, label, ours): peers as they stand in the table, then the ladder."""
    for line in (HERE.parent / "RESULTS.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == f"`{PROBLEM}`" and "eager" not in cells[1]:
            yield cells[1], float(cells[2].split()[0]), cells[2], False
        elif len(cells) == 5 and re.match(r"`cuda/\w+`:", cells[0]) and "l2" not in cells[0]:
            name, time, share = cells[0].split(":")[0].strip("`"), cells[1], cells[4]
            yield name, float(time.split()[0]), f"{time}, {share} of the limit", True


def draw():
    bars = list(rows())
    height = TOP + ROW * len(bars) + 14
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="26" font-size="16" font-weight="bold" fill="#1f2933">'
        "Ten denoise steps of the pi0.5 action expert on one H200, bf16</text>",
        '<text x="16" y="46" font-size="12" fill="#52606d">'
        "shorter is better; blue: rows of this repository, with the fraction of the measured "
        "roofline; grey: PyTorch; from RESULTS.md</text>",
    ]
    for number, (name, milliseconds, label, ours) in enumerate(bars):
        y = TOP + ROW * number
        out += [
            f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end" fill="#1f2933">{name}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{milliseconds * SCALE:.1f}" height="20" '
            f'fill="{"#2b6cb0" if ours else "#9aa5b1"}"/>',
            f'<text x="{LEFT + milliseconds * SCALE + 8:.1f}" y="{y + 17}" fill="#1f2933">'
            f"{label}</text>",
        ]
    return "\n".join(out + ["</svg>"]) + "\n"


(HERE / "ladder.svg").write_text(draw())
