"""Codes with zero points as codes with offsets: (q - z) * s = (q - middle) * s + (middle - z) * s."""

from __future__ import annotations

from .expression import Value, arithmetic, dequantize, number


def with_zero_points(
    codes: Value, scale: Value, zeros: Value | None, middle: int, format: str, group: int
) -> Value:
    """The weight [N, K] of codes from which ``middle`` is subtracted already.

    ``zeros``: [N, G], zero points as they are stored, of codes that count from 0; None: all are ``middle``.
    ``group`` as wide as the row or wider is a scale for the row.
    """
    group = 0 if group >= codes.shape[1] else group
    if zeros is None:
        return dequantize(codes, scale, None, format, group)
    shift = arithmetic("Sub", number(middle), zeros)
    return dequantize(codes, scale, arithmetic("Mul", shift, scale), format, group)
