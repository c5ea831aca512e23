"""Safe reading of files that anyone may have written, and whole-or-nothing writing.

What a file asks for is looked up in its header and bounded before memory is taken for it, and
nothing is ever unpickled. Whatever is wrong with a file becomes one `BadFile`.
"""

from segcal.files.arrays import Npz, npy_shape, read_npy
from segcal.files.distribution import is_distribution, rounding_of
from segcal.files.errors import BadFile, naming, one_line
from segcal.files.images import image_size, read_mask, read_rgb
from segcal.files.limits import check_num_classes, check_size
from segcal.files.text import read_yaml
from segcal.files.writing import atomic_write, name_file, utf8

__all__ = [
    "BadFile",
    "Npz",
    "atomic_write",
    "check_num_classes",
    "check_size",
    "image_size",
    "is_distribution",
    "name_file",
    "naming",
    "npy_shape",
    "one_line",
    "read_mask",
    "read_npy",
    "read_rgb",
    "read_yaml",
    "rounding_of",
    "utf8",
]
