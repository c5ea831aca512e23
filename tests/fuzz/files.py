"""Files as bytes: archives, pictures, checkpoints, and one that would do harm."""

from __future__ import annotations

import io
import os

import numpy as np
import torch
from PIL import Image


class Payload:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("pwned",)


def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def png(array, **options):
    buffer = io.BytesIO()
    image = Image.fromarray(array)
    if options.pop("palette", False):
        image = image.convert("P")
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


def pt(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
