"""Pictures of samples as PNG."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any


def png_url(picture: Mapping[str, Any]) -> str:
    """Return a picture of the record as the data URL of a PNG."""
    from PIL import Image

    mode = "L" if picture["channels"] == 1 else "RGB"
    size = picture["width"], picture["height"]
    image = Image.frombytes(mode, size, base64.b64decode(picture["pixels"]))
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode('ascii')}"
