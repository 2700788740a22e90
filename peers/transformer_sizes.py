"""Sizes of the language model: width, hidden width, layers, heads, vocabulary."""

SIZES = {
    "reduced": (128, 384, 2, 2, 1000),
    "small": (768, 3072, 12, 12, 10_000),
    "medium": (1024, 4096, 24, 16, 10_000),
    "large": (1280, 5120, 36, 20, 10_000),
    "xl": (1600, 6400, 48, 25, 10_000),
    "2.7B": (2560, 10_240, 32, 32, 10_000),
}
