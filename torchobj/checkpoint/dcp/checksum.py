"""CRC-32 of bytes whose parts were summed apart."""

import functools

__all__ = ["combine"]

#: The polynomial of zip and zlib, its bits in reverse.
_POLYNOMIAL = 0xEDB8_8320
_ONE = 1 << 31


def _product(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of the sum."""
    product, bit = 0, _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@functools.lru_cache(64)
def _square(power: int) -> int:
    """`x` to the power of `2**power`."""
    if power == 0:
        return _ONE >> 1
    half = _square(power - 1)
    return _product(half, half)


@functools.lru_cache(4096)
def _shift(length: int) -> int:
    """What moves a sum over `length` bytes."""
    result, power = _ONE, 3
    while length:
        if length & 1:
            result = _product(_square(power), result)
        length >>= 1
        power += 1
    return result


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of bytes that are joined.

    Args:
        first: Of what stands first; 0 where that is empty.
        second: Of what stands behind it.
        second_bytes: How long that is.

    Example:
        >>> import zlib
        >>> combine(zlib.crc32(b"check"), zlib.crc32(b"point"), 5) == zlib.crc32(b"checkpoint")
        True
    """
    return _product(_shift(second_bytes), first) ^ second
