"""Encoded images: their names, and what is checked before one of them reaches a policy."""

import hashlib
import io
import warnings

from PIL import Image, UnidentifiedImageError

from gleaner.conf.errors import BadImageError

MOST_PIXELS = 20_000_000
"""A larger picture is refused before it is decoded: a file of a few kilobytes may hold gigabytes of pixels."""
LONGEST_SIDES = 50
"""Refused when one side is this many times the other: scaled to a policy's square it would show nothing."""


def image_digest(data: bytes) -> str:
    """The name under which an image is stored: SHA-256 of its encoded bytes (hex)."""
    return hashlib.sha256(data).hexdigest()


def decode_image(data: bytes) -> Image.Image:
    """The picture, in RGB and wholly decoded.

    Raises:
        BadImageError: no image, a truncated one, one of absurd size or shape.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP"))
            width, height = picture.size
            if width * height > MOST_PIXELS:
                raise BadImageError(
                    f"an image of {width} x {height} pixels is larger than {MOST_PIXELS:,}: scale it down before it is "
                    "shown"
                )
            if max(width, height) > LONGEST_SIDES * min(width, height):
                raise BadImageError(
                    f"an image of {width} x {height} pixels is a line: show a part that can be seen"
                )
            return picture.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise BadImageError(
            f"{len(data)} bytes are no whole PNG, JPEG or WebP image ({error}): check what made them"
        ) from error
