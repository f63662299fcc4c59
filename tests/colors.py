"""Colours as people see them: contrast, and what is left of a colour with each kind of colour vision."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Machado, Oliveira, Fernandes (2009), "A physiologically-based model for simulation of color vision
# deficiency", table 1: severity 1.0, on linear RGB.
VISION = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(parts: Sequence[float]) -> list[float]:
    """Linear RGB of sRGB from 0 to 255."""
    scaled = [c / 255 for c in parts]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in scaled]


def luminance(color: str) -> float:
    """The relative luminance of a CSS rgb(…) (WCAG 2.2)."""
    r, g, b = linear([float(x) for x in re.findall(r"[\d.]+", color)[:3]])
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    """The contrast ratio of two CSS colours (WCAG 2.2)."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: Sequence[float]) -> list[float]:
    """CIE L*a*b* of linear sRGB, white D65."""
    r, g, b = (min(1.0, max(0.0, c)) for c in rgb)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def seen(color: str, vision: str) -> list[float]:
    """CIE L*a*b* of a CSS #rrggbb as somebody with this vision sees it."""
    rgb = linear([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    return lab([sum(w * c for w, c in zip(row, rgb, strict=True)) for row in VISION[vision]])
