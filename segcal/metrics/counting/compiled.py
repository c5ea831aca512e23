"""The compiled passes on the CPU: one walk over the pixels, a block of them at a time.

A block is a (K, P) piece of the logits that the cache holds. To count, it is loaded once, becomes
probabilities in place, and leaves behind everything that the meter keeps. In each pixel fewer than
B classes can have a probability past the first bin edge, and mostly one or two do: only those are
sorted into bins, and the rest of a row belongs to the first bin.

The loops over the pixels of a block are written such that LLVM makes vector code of them. numba
compiles again when the file of a function has changed, and looks at no other: so all compiled code
stands in this one, and the numbers it has in common with others stand here again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

BLOCK_VALUES = 1 << 15  # K · P of a block, which the second-level cache holds
LEAST_BLOCK, MOST_BLOCK = 64, 512  # P
CACHE_LINE = 64  # bytes
WORD = 64  # pixels whose bits are looked at together; P is a multiple
BAD_LABELS, BAD_VALUES = -1, -2  # instead of a number of pixels

# Those of `segcal.metrics.sums`; a test compares them.
FINE_CELLS, FINE_STEPS, OCTAVES, FINE_BINS, CLASS_STEP = 1024, 64, 24, 2241, 16
MOST_NLL = 1e300

# "contract" rounds a product and a sum once instead of twice. Nothing more: NaN must stay NaN, and
# the subtraction of a constant that was just added must not be left out.
_EXACT: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
# For sums in float64, whose order may suit the vectors.
_ANY_ORDER: dict[str, Any] = {**_EXACT, "fastmath": {"contract", "reassoc", "nsz"}}

_STEP_BITS = FINE_STEPS.bit_length() - 1
_ONE = np.uint64(1)


class Tables(NamedTuple):
    """What `count_pixels` adds to: sums of A groups of pixels, all float64, counts too.

    A count and a sum that belong together lie side by side: one step adds to both. The first axis
    is that of groups, or of R images and then groups if images are told apart.
    """

    classes: NDArray[np.float64]  # (R A, K, B, 2) count and Σ p; the first bin's count stays 0
    hits: NDArray[np.float64]  # (R A, K, B)
    top: NDArray[np.float64]  # (R A, B, 2, 2) wrong and right, count and Σ p
    predicted: NDArray[np.float64]  # (R A, K, 2) wrong and right; only if images are told apart
    fine: NDArray[np.float64]  # (A, F, 2, 2) like `top`
    class_fine: NDArray[np.float64]  # (A, K, G, 2) wrong and right; or (A, 0, G, 2) for nothing
    confusion: NDArray[np.int64]  # (A, K K), or (A, 0) to get a list of cells
    scores: NDArray[np.float64]  # (A, 2) NLL and Brier


@intrinsic
def _bits_as_float(context, bits):
    """The float that has the bits of an int32 or int64."""
    result = types.float32 if bits.bitwidth == 32 else types.float64

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(result))

    return result(bits), generate


@intrinsic
def _float_as_bits(context, number):
    """The bits of a float, as int32 or int64."""
    result = types.int32 if number.bitwidth == 32 else types.int64

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(result))

    return result(number), generate


@intrinsic
def _past(context, row, start, edge):
    """64 bits: bit i is whether row[start + i] > edge. LLVM would not find the vector code."""
    whole = isinstance(row.dtype, types.Integer)

    def generate(context, builder, signature, arguments):
        array, first, least = arguments
        data = context.make_array(row)(context, builder, array).data
        vector = ir.VectorType(context.get_data_type(row.dtype), WORD)
        at = builder.bitcast(builder.gep(data, [first]), vector.as_pointer())
        numbers = builder.load(at, align=row.dtype.bitwidth // 8)
        nothing, zero = ir.Constant(vector, ir.Undefined), ir.Constant(ir.IntType(32), 0)
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), WORD), None)  # all 0
        least = builder.shuffle_vector(builder.insert_element(nothing, least, zero), nothing, lanes)
        compare = builder.icmp_signed if whole else builder.fcmp_ordered
        return builder.bitcast(compare(">", numbers, least), ir.IntType(WORD))

    return types.uint64(row, types.intp, row.dtype), generate


@intrinsic
def _lowest(context, bits):
    """The number of the lowest bit that is set, of some."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic
def _prefetch(context, array, index):
    """Have the memory of array[index] brought to the cache; it may lie outside of the array."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        at = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [at.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [at.type], kind)
        how = (ir.Constant(number, n) for n in (0, 2, 1))  # to read, second-level cache, data
        builder.call(function, [at, *how])
        return context.get_dummy_value()

    return types.none(array, types.intp), generate


def _exp(x):
    """exp(x) for x <= 0, float32 or float64, to 1.2 ulp; libm would take one number at a time.

    exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln(2) / 2, where a short Taylor series
    is exact to a tenth of an ulp. NaN stays NaN.
    """
    raise NotImplementedError("for compiled code alone")


@overload(_exp)
def _exp_of(x):
    single = x.bitwidth == 32
    real, whole = (np.float32, np.int32) if single else (np.float64, np.int64)
    mantissa, bias, degree = (23, 127, 7) if single else (52, 1023, 13)
    least = real(-104 if single else -746)  # exp of anything less is 0
    # ln 2 in two parts, the first with so few bits that n times it is exact.
    high = real(355 / 512 if single else 6.93147180369123816490e-01)
    low = real(-2.12194440054690583e-04 if single else 1.90821492927058770002e-10)
    per_ln2 = real(1 / math.log(2))
    # A number of this size has no bits for a fraction: added, it rounds to n. Its own last bits are
    # the exponent of 1, and 64 more, because 2^n can be too small for a normal number.
    rounding = real(1.5 * 2.0**mantissa + bias + 64)
    undo, shift = real(2.0**-64), whole(mantissa)
    taylor = tuple(real(1 / math.factorial(i)) for i in range(degree, -1, -1))

    def implementation(x):
        x = least if x < least else x
        rounded = x * per_ln2 + rounding
        n = rounded - rounding
        r = (x - n * high) - n * low
        y = taylor[0]
        for i in range(degree):
            y = y * r + taylor[i + 1]
        # The shift leaves of the bits the last ones alone: the exponent.
        return y * _bits_as_float(whole(_float_as_bits(rounded) << shift)) * undo

    return implementation


def _widened(x, bfloat16):
    """A number as float32 or float64; uint16 holds the bits of float16, or of bfloat16."""
    raise NotImplementedError("for compiled code alone")


@overload(_widened)
def _widened_of(x, bfloat16):
    if isinstance(x, types.Float):

        def unchanged(x, bfloat16):
            return x

        return unchanged
    rebias = np.float32(2.0 ** (127 - 15))  # of the exponent

    def widened(x, bfloat16):
        bits = np.int32(x)
        if bfloat16:
            return _bits_as_float(np.int32(bits << np.int32(16)))
        # The product is exact, for the numbers below the normal ones of float16 too.
        size = _bits_as_float(np.int32(np.int32(bits & 0x7FFF) << np.int32(13))) * rebias
        special = np.int32(np.int32(bits & 0x7C00) == 0x7C00) * np.int32(0x7F800000)
        sign = np.int32(np.int32(bits & 0x8000) << np.int32(16))
        return _bits_as_float(np.int32(_float_as_bits(size) | special | sign))

    return widened


@njit(**_EXACT)
def _collect(code, groups, target, offset, step, n, group, at, y):
    """Append the pixels of an image that count to those of a block, as many as it holds.

    Args:
        code: of the pixels.
        groups: of all codes.
        target: of the pixels.
        offset: where in the memory of a class the first value is.
        step: from there to the next.
        n: how many pixels the block has.
        group: gets the groups.
        at: gets where the values are.
        y: gets the labels.

    Returns:
        How many pixels the block has now, and how many of the image were looked at.
    """
    i = 0
    while n < len(group) and i < len(code):
        a = groups[code[i]]
        group[n], at[n], y[n] = a, offset, target[i]
        n += a >= 0
        i += 1
        offset += step
    return n, i


@njit(**_EXACT)
def _take(code, groups, target, offset, step, group, at, y):
    """Make a block of all pixels given; see `_collect`. Returns how many count."""
    pixels, counted = len(code), 0
    for j in range(pixels):  # apart, because it is no vector code
        group[j] = groups[code[j]]
    for j in range(pixels):
        at[j] = offset + j * step
        y[j] = target[j] if group[j] >= 0 else 0
        counted += group[j] >= 0
    return counted


@njit(**_EXACT)
def _fill(code, groups, target, strides, length, per_image, gaps, place, ints, y, seen):
    """Collect a block of pixels, of one image if `per_image`; returns how many.

    Args:
        code: of all pixels.
        groups: of all codes.
        target: of all pixels.
        strides: of the values.
        length: pixels of an image.
        per_image: whether to tell images apart.
        gaps: whether the block may have pixels that do not count, of group -1 and label 0. If
            they are the minority, it is quicker to compute them too than to leave them out.
        place: the first pixel: its image, and its number there; gets the next one.
        ints: the first row gets groups, the second where in the memory of a class the values are.
        y: gets labels.
        seen: see `count_pixels`.
    """
    group, at = ints[0], ints[1]
    image, pixel = place
    n = min(len(group), length - pixel)
    if gaps and (per_image or n >= LEAST_BLOCK):
        start, offset = image * length + pixel, image * strides[0] + pixel * strides[2]
        codes, labels = code[start : start + n], target[start : start + n]
        if 2 * _take(codes, groups, labels, offset, strides[2], group, at, y) >= n:
            for j in range(n):
                seen[image, group[j] + 1] = True
            last = pixel + n == length
            place[0], place[1] = image + last, 0 if last else pixel + n
            return n
    n = 0
    while n < len(group) and image < len(seen):
        first, start, stop = n, image * length + pixel, (image + 1) * length
        offset = image * strides[0] + pixel * strides[2]
        n, done = _collect(
            code[start:stop], groups, target[start:stop], offset, strides[2], n, group, at, y
        )
        for j in range(first, n):
            seen[image, group[j] + 1] = True
        pixel += done
        if pixel == length:
            image, pixel = image + 1, 0
            if per_image:
                break
    place[0], place[1] = image, pixel
    return n


@njit(**_EXACT)
def _all_classes(y, k):
    """Whether all labels are classes."""
    right = True
    for j in range(len(y)):
        right &= 0 <= y[j] < k
    return right


@njit(**_EXACT)
def _find_group(a, group, members):
    """Fill `members`, of WORD pixels each, with bits of those in group a; returns if any are."""
    found = np.uint64(0)
    for w in range(len(members)):
        bits = _past(group, w * WORD, a - 1) & ~_past(group, w * WORD, a)
        members[w] = bits
        found |= bits
    return found != 0


@njit(**_EXACT)
def _load(values, step, at, bfloat16, block, high):
    """Fill the (K, P) block with the values `at` each class's memory; find the largest."""
    pixels, real = len(at), block.dtype.type
    contiguous = True
    for j in range(pixels):
        high[j] = -np.inf
        contiguous &= at[j] - at[0] == j
    for c in range(len(block)):
        row, given = block[c], values[c * step :]
        if contiguous:
            given = given[at[0] :]
            for j in range(pixels):
                x = real(_widened(given[j], bfloat16))
                row[j] = x
                high[j] = x if x > high[j] else high[j]
        else:
            for j in range(pixels):
                x = real(_widened(given[at[j]], bfloat16))
                row[j] = x
                high[j] = x if x > high[j] else high[j]


@njit(**_EXACT)
def _bring(values, start, n):
    """Have n values brought to the cache that will soon be loaded."""
    for i in range(start, start + n, CACHE_LINE // values.itemsize):
        _prefetch(values, i)


@njit(**_EXACT)
def _softmax(block, high, total, norm, top, best):
    """Make probabilities of logits.

    Args:
        block: (K, P) logits.
        high: (P,) the largest.
        total: (P,) float64, gets Σ exp(z_c - high).
        norm: (P,) is used.
        top: (P,) gets the largest probability.
        best: (P,) gets the first class that has the largest logit.
    """
    k, pixels, real, wide = np.int32(len(block)), len(high), block.dtype.type, np.float64
    for j in range(pixels):
        total[j] = 0.0
        best[j] = k
    for c in range(k):
        row, this = block[c], np.int32(c)
        for j in range(pixels):
            found = this if row[j] == high[j] else k
            best[j] = found if found < best[j] else best[j]
            row[j] = _exp(row[j] - high[j])
    for c in range(0, k - 3, 4):  # four at once: a sum in float64 costs as much as exp
        one, two, three, four = block[c], block[c + 1], block[c + 2], block[c + 3]
        for j in range(pixels):
            total[j] += (wide(one[j]) + wide(two[j])) + (wide(three[j]) + wide(four[j]))
    for c in range(k - k % 4, k):
        row = block[c]
        for j in range(pixels):
            total[j] += row[j]
    for j in range(pixels):
        norm[j] = total[j]
        top[j] = real(1) / norm[j]
    for c in range(k):
        row = block[c]
        for j in range(pixels):
            row[j] /= norm[j]


@njit(**_EXACT)
def _clamp(block, high, low, total, top, best):
    """Bring probabilities back that rounding took out of 0..1.

    Args:
        block: (K, P) probabilities.
        high: (P,) the largest, as given.
        low: (P,) gets the least, as given.
        total: (P,) float64, gets their sum, as given.
        top: (P,) gets the largest.
        best: (P,) gets the first class that has it.
    """
    k, pixels, real = np.int32(len(block)), len(high), block.dtype.type
    for j in range(pixels):
        total[j] = 0.0
        low[j] = np.inf
        top[j] = min(max(high[j], real(0)), real(1))
        best[j] = k
    for c in range(k):
        row, this = block[c], np.int32(c)
        for j in range(pixels):
            x = row[j]
            total[j] += x
            low[j] = x if x < low[j] else low[j]
            p = min(max(x, real(0)), real(1))
            row[j] = p
            found = this if p == top[j] else k
            best[j] = found if found < best[j] else best[j]


@njit(**_EXACT)
def _usable_logits(group, distance, total):
    """Whether all is finite that must be: not so after NaN or +inf, or -inf at the label."""
    usable = True
    for j in range(len(total)):
        usable &= (distance[j] <= MOST_NLL and total[j] >= 1) or group[j] < 0
    return usable


@njit(**_EXACT)
def _usable_probs(group, low, total, rounding):
    """Whether all are distributions; see `segcal.files.is_distribution`."""
    below, off = rounding
    usable = True
    for j in range(len(total)):
        usable &= (low[j] >= -below and abs(total[j] - 1) <= off) or group[j] < 0
    return usable


@njit(**_EXACT)
def _bin_scale(edges):
    """A factor whose product with p is less than b + 1 if p <= edges[b + 1], but hardly less."""
    scale = np.float64(len(edges) - 1)
    for b in range(1, len(edges) - 1):
        scale = min(scale, b / np.float64(edges[b]))
    return edges.dtype.type(scale * (1 - 4 * np.finfo(edges.dtype).eps))


@njit(**_EXACT)
def _bin(p, edges, scale):
    """The b with edges[b] < p <= edges[b + 1], unsigned: such an index is used as it is."""
    b = np.uint64(np.uint32(np.int32(p * scale)))
    while p > edges[b + _ONE]:  # next to an edge
        b += _ONE
    return b


@njit(**_ANY_ORDER)
def _row_sums(row, group, a, edge):
    """(Σ p where p <= edge, Σ p²) of the pixels of group a in a row of probabilities."""
    below, squares = 0.0, 0.0
    for j in range(len(group)):
        p = np.float64(row[j] if group[j] == a else row.dtype.type(0))
        squares += p * p
        below += p if row[j] <= edge else 0.0
    return below, squares


@njit(**_EXACT)
def _count_classes(row, group, a, members, edges, scale, table):
    """Put a class's probabilities into the bins of `table` (B, 2); returns Σ p²."""
    below, squares = _row_sums(row, group, a, edges[1])
    table[0, 1] += below
    for w in range(len(members)):
        bits, part = members[w] & _past(row, w * WORD, edges[1]), row[w * WORD :]
        while bits:
            p = part[_lowest(bits)]
            bits &= bits - _ONE
            b = _bin(p, edges, scale)
            table[b, 0] += 1.0
            table[b, 1] += p
    return squares


@njit(**_EXACT)
def _find_fine(top, fine):
    """Fill `fine` with the fine bins of the largest probabilities; see `device.fine_bin`."""
    real, single = top.dtype.type, top.itemsize == 4
    shift = (23 if single else 52) - _STEP_BITS  # of the bits of 1 - p
    top_step = np.int32(((127 if single else 1023) - OCTAVES) * FINE_STEPS + FINE_BINS - 2)
    last, first, zero = np.int32(FINE_BINS - 1), np.int32(FINE_CELLS - 1), np.int32(0)
    for j in range(len(top)):
        q = real(1) - top[j]
        near = np.int32(top_step - np.int32(_float_as_bits(q) >> shift))
        near = near if near < last else last
        cell = np.int32(q * real(FINE_CELLS))
        far = np.int32(first - cell)
        far = far if far > zero else zero
        fine[j] = near if cell < np.int32(FINE_STEPS) else far


@njit(**_EXACT)
def _count_labels(
    block, y, top, best, fine, members, edges, scale, per_image, a, r, tables, cells
):  # fmt: skip
    """Count what the labels tell: hits, and the confusion.

    Returns:
        How many pixels there are, and the sum of their label's p.
    """
    k = np.uint64(len(block))
    top_table, fine_table, hits = tables.top[r], tables.fine[a], tables.hits[r]
    predicted, confusion = tables.predicted[r], tables.confusion[a]
    class_fine = tables.class_fine[a]
    pixels, sum_true = 0, 0.0
    for w in range(len(members)):
        bits, start = members[w], np.uint64(w * WORD)
        while bits:
            j = start + _lowest(bits)
            bits &= bits - _ONE
            label, c, p = np.uint64(y[j]), np.uint64(np.uint32(best[j])), top[j]
            right = np.uint64(c == label)
            b = _bin(p, edges, scale)
            top_table[b, right, 0] += 1.0
            top_table[b, right, 1] += p
            b = np.uint64(np.uint32(fine[j]))
            fine_table[b, right, 0] += 1.0
            fine_table[b, right, 1] += p
            if len(class_fine):
                class_fine[c, b // np.uint64(CLASS_STEP), right] += 1.0
            true = block[label, j]
            hits[label, _bin(true, edges, scale)] += 1.0
            sum_true += true
            if per_image:
                predicted[c, right] += 1.0
            if not len(confusion):
                cells[pixels] = (np.uint64(a) * k + label) * k + c
            else:
                confusion[label * k + c] += 1
            pixels += 1
    return pixels, sum_true


@njit(**_ANY_ORDER)
def _nll(group, a, distance, factor, run):
    """Σ distance + log(factor) of group a; one logarithm for `run` factors of finite product."""
    total = 0.0
    for start in range(0, len(factor), run):
        product, part, of = 1.0, factor[start : start + run], group[start : start + run]
        for j in range(len(part)):
            product *= part[j] if of[j] == a else 1.0
        total += math.log(product)
    for j in range(len(group)):
        total += distance[j] if group[j] == a else 0.0
    return total


def _compiled_once(function):
    """Compile a function and keep it on the disk: in the package's folder, or the user's cache."""
    try:
        return njit(**_EXACT, cache=True)(function)
    except RuntimeError:  # neither can be written
        return njit(**_EXACT)(function)


@njit(**_EXACT)
def _block_width(k):
    """P of a block of K classes."""
    return min(max(BLOCK_VALUES // k // WORD * WORD, LEAST_BLOCK), MOST_BLOCK)


@_compiled_once
def count_pixels(
    values, strides, length, bfloat16, target, code, groups, logits, rounding, largest, edges,
    per_image, tables, cells, seen,
):  # fmt: skip
    """Add pixels to `tables`.

    Args:
        values: the memory of (n, K, l) logits or probabilities; uint16 for half precision.
        strides: steps in it to the next image, class and pixel.
        length: l.
        bfloat16: whether half precision is that.
        target: (n l,) labels.
        code: (n l,) uint8, an index for `groups`.
        groups: (256,) which of the A groups a code means; -1 for none.
        logits: whether the values are logits.
        rounding: how far a probability may be below 0, and their sum from 1.
        largest: 1 / p can be for the NLL: K for logits.
        edges: (B + 1,) of bins (edges[b], edges[b + 1]] from -inf to inf, in the dtype that all is
            computed in.
        per_image: whether to tell images apart.
        tables: what to add to.
        cells: (n l,) gets (group · K + label) · K + prediction of each pixel that counts, if
            `tables.confusion` is empty.
        seen: (n, 1 + A) gets whether an image has pixels that do not count, and of each group.

    Returns:
        The number of pixels counted, or BAD_LABELS or BAD_VALUES; the tables then mean nothing.
    """
    k, num_groups = tables.hits.shape[1], len(tables.scores)
    width = _block_width(k)
    run = max(int(300 / math.log10(largest)), 1)
    scale = _bin_scale(edges)
    block = np.zeros((k, width), edges.dtype)
    floats = np.empty((4, width), edges.dtype)
    doubles = np.empty((2, width), np.float64)
    ints = np.empty((4, width), np.int32)
    longs = np.empty(width, np.int64)
    words = np.empty(width // WORD, np.uint64)
    place = np.zeros(2, np.int64)
    counted = 0
    while place[0] < len(seen):
        first_row = place[0] * num_groups if per_image else 0
        n = _fill(code, groups, target, strides, length, per_image, True, place, ints, longs, seen)
        if not n:
            continue
        ints[0, n:] = -1
        group, at, best, fine = ints[0, :n], ints[1, :n], ints[2, :n], ints[3, :n]
        y = longs[:n]
        high, low, norm, top = floats[0, :n], floats[1, :n], floats[2, :n], floats[3, :n]
        total, distance = doubles[0, :n], doubles[1, :n]
        members = words[: (n + WORD - 1) // WORD]
        if not _all_classes(y, k):
            return BAD_LABELS
        _load(values, strides[1], at, bfloat16, block, high)
        if logits:
            for j in range(n):
                distance[j] = np.float64(high[j]) - np.float64(block[y[j], j])
            _softmax(block, high, total, norm, top, best)
            usable = _usable_logits(group, distance, total)
        else:
            _clamp(block, high, low, total, top, best)
            usable = _usable_probs(group, low, total, rounding)
            for j in range(n):
                distance[j] = 0.0
                total[j] = 1 / max(np.float64(block[y[j], j]), 1 / largest)
        if not usable:
            return BAD_VALUES
        _find_fine(top, fine)
        for a in range(max(group.min(), 0), group.max() + 1):
            if not _find_group(a, ints[0], members):
                continue
            r = first_row + a
            pixels, sum_true = _count_labels(
                block, y, top, best, fine, members, edges, scale, per_image, a, r, tables,
                cells[counted:],
            )  # fmt: skip
            brier = pixels - 2 * sum_true
            for c in range(k):
                # The processor follows one stream of numbers by itself, but not those of K classes.
                _bring(values, c * strides[1] + at[n - 1] + 1, n)
                brier += _count_classes(
                    block[c], group, a, members, edges, scale, tables.classes[r, c]
                )
            tables.scores[a, 0] += _nll(group, a, distance, total, run)
            tables.scores[a, 1] += brier
            counted += pixels
    return counted


@njit(**_EXACT)
def _weigh(z, beta, squared, weight, norm, first, second):
    """Compute the weights exp(β z), or square those of β / 2; and Σ_c w, Σ_c w z, Σ_c w z²."""
    pixels = len(norm)
    for j in range(pixels):
        norm[j], first[j], second[j] = 0.0, 0.0, 0.0
    for c in range(len(z)):
        row, w = z[c], weight[c]
        if squared:
            for j in range(pixels):
                w[j] *= w[j]
        else:
            for j in range(pixels):
                w[j] = _exp(row[j] * beta)
        for j in range(pixels):
            norm[j] += w[j]
            first[j] += w[j] * row[j]
            second[j] += w[j] * row[j] * row[j]


@njit(**_ANY_ORDER)
def _sum_slopes(norm, first, second, true):
    """Σ E[z] - z_y and Σ Var[z] of weights with the given moments."""
    slope, curvature = 0.0, 0.0
    for j in range(len(norm)):
        mean = first[j] / norm[j]
        slope += mean - true[j]
        curvature += second[j] / norm[j] - mean * mean
    return slope, curvature


@_compiled_once
def sum_tempered(
    values, strides, classes, length, bfloat16, target, code, groups, betas, squarings, sums
):  # fmt: skip
    """Add to `sums` the NLL of softmax(β z) and its first two derivatives in β, in float64.

    Args:
        values: the memory of (n, K, l) logits; uint16 for half precision.
        strides: steps in it to the next image, class and pixel.
        classes: K.
        length: l.
        bfloat16: whether half precision is that.
        target: (n l,) labels.
        code: (n l,) uint8, an index for `groups`.
        groups: 0 for codes of pixels that count, else -1.
        betas: the first β of each of several series, in which every β is twice the one before:
            exp(2 β z) is the square of exp(β z).
        squarings: how many follow the first, for each series.
        sums: (number of all β, 3).
    """
    width = _block_width(classes)
    run = max(int(300 / math.log10(classes)), 1)
    memory = np.empty((2, classes * width))
    doubles = np.empty((6, width))
    ints, longs = np.empty((2, width), np.int32), np.empty(width, np.int64)
    seen = np.empty((len(target) // max(length, 1), 2), np.bool_)
    place = np.zeros(2, np.int64)
    while place[0] < len(seen):
        n = _fill(code, groups, target, strides, length, False, False, place, ints, longs, seen)
        if not n:
            continue
        group, at, y = ints[0, :n], ints[1, :n], longs[:n]
        z = memory[0, : classes * n].reshape(classes, n)
        weight = memory[1, : classes * n].reshape(classes, n)
        high, true, norm = doubles[0, :n], doubles[1, :n], doubles[2, :n]
        first, second, distance = doubles[3, :n], doubles[4, :n], doubles[5, :n]
        _load(values, strides[1], at, bfloat16, z, high)
        for c in range(classes):
            row = z[c]
            for j in range(n):
                row[j] -= high[j]
        for j in range(n):
            true[j] = z[y[j], j]
        r = 0
        for i in range(len(betas)):
            beta = betas[i]
            for squared in range(squarings[i] + 1):
                _weigh(z, beta, squared > 0, weight, norm, first, second)
                for j in range(n):
                    distance[j] = -beta * true[j]
                slope, curvature = _sum_slopes(norm, first, second, true)
                sums[r, 0] += _nll(group, 0, distance, norm, run)
                sums[r, 1] += slope
                sums[r, 2] += curvature
                beta *= 2
                r += 1
