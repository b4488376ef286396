"""Triton kernels for attention over paged KV: grouped heads, split walks, ancestor bit masks; and plans of chains.

Knows the integers of tiles.py, and two layouts of what pages hold: keys and values of each KV head, or latents, which
all heads share: a latent's first numbers are the value, all of them the key (DeepSeek-V2, arXiv 2405.04434, in its
absorbed form), so one load serves both products. Does not know why a row sees what it sees. Online softmax as in
FlashAttention (arXiv 2205.14135) and split walks as in FlashDecoding (Dao et al. 2023). The program that ends last
merges the splits of its tile, in their order, so results do not depend on which one that is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from distspec.kernels.launch import in_turn


@triton.jit
def _keyed(q, keys, values, pages, index, inside, stride, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
           PAGE: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr):  # fmt: skip
    """Scores with the keys at these indices, unscaled [M, N], and their values [N, DIM_PAD]."""
    dim = tl.arange(0, DIM_PAD)
    if MASKED or DIM != DIM_PAD:
        page = tl.load(pages + index // PAGE, mask=inside, other=0).to(OFFSET)
        where = (page * PAGE + index % PAGE) * stride
        there = inside[:, None] & (dim < DIM)[None, :]
        k = tl.load(keys + where[None, :] + dim[:, None], mask=tl.trans(there), other=0.0)
        v = tl.load(values + where[:, None] + dim[None, :], mask=there, other=0.0)
    else:
        where = (tl.load(pages + index // PAGE).to(OFFSET) * PAGE + index % PAGE) * stride
        k = tl.load(keys + where[None, :] + dim[:, None])
        v = tl.load(values + where[:, None] + dim[None, :])
    return tl.dot(q, k, input_precision=PRECISION), v


@triton.jit
def _latent(q, q_rest, keys, pages, index, inside, stride, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
            REST: tl.constexpr, REST_PAD: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr,
            PRECISION: tl.constexpr, OFFSET: tl.constexpr):  # fmt: skip
    """As _keyed, of latents: what is read once is value and most of the key."""
    dim, rest = tl.arange(0, DIM_PAD), DIM + tl.arange(0, REST_PAD)
    if MASKED or DIM != DIM_PAD or REST != REST_PAD:
        page = tl.load(pages + index // PAGE, mask=inside, other=0).to(OFFSET)
        where = (page * PAGE + index % PAGE) * stride
        v = tl.load(keys + where[:, None] + dim[None, :], mask=inside[:, None] & (dim < DIM)[None, :], other=0.0)
        more = inside[None, :] & (rest < DIM + REST)[:, None]
        k = tl.load(keys + where[None, :] + rest[:, None], mask=more, other=0.0)
    else:
        where = (tl.load(pages + index // PAGE).to(OFFSET) * PAGE + index % PAGE) * stride
        v = tl.load(keys + where[:, None] + dim[None, :])
        k = tl.load(keys + where[None, :] + rest[:, None])
    scores = tl.dot(q, tl.trans(v), input_precision=PRECISION)
    return tl.dot(q_rest, k, scores, input_precision=PRECISION), v


@triton.jit
def _block(q, q_rest, keys, values, pages, masks, valid, limit, length, start, end, words, stride, scale, top, total,
           acc, DIM: tl.constexpr, DIM_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
           PAGE: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
           OFFSET: tl.constexpr):  # fmt: skip
    """One step of the online softmax: N keys from `start` on. MASKED: not all rows see all of them."""
    index = start + tl.arange(0, N)
    inside = index < end
    if REST:
        scores, v = _latent(q, q_rest, keys, pages, index, inside, stride, DIM, DIM_PAD, REST, REST_PAD, PAGE, MASKED,
                            PRECISION, OFFSET)  # fmt: skip
    else:
        scores, v = _keyed(q, keys, values, pages, index, inside, stride, DIM, DIM_PAD, PAGE, MASKED, PRECISION,
                           OFFSET)  # fmt: skip
    if MASKED:
        scratch = index - length
        look = valid[:, None] & (inside & (scratch >= 0))[None, :]
        bits = tl.load(masks[:, None] + (scratch // 32)[None, :], mask=look, other=0)
        seen = (index[None, :] < limit[:, None]) | (((bits >> (scratch % 32)[None, :]) & 1) == 1)
        scores = tl.where(seen, scores, float("-inf"))
    best = tl.maximum(top, tl.max(scores, 1) * scale)
    # A row that has seen nothing yet: -inf minus -inf is no number.
    safe = tl.where(best == float("-inf"), 0.0, best) if MASKED else best
    weight = tl.exp2(scores * scale - safe[:, None])
    keep = tl.exp2(top - safe)
    total = total * keep + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return best, total, acc


@triton.jit
def _log_sums(sums, at, splits, valid, step, M: tl.constexpr):
    """Of the splits whose log-sums begin at `sums` + `at` and every `step` further: the largest, and the sum of all
    weights beside it, [M] each."""
    lane = tl.arange(0, M)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    for first in range(0, splits, 32):
        split = first + tl.arange(0, 32)
        there = (split < splits)[:, None] & valid[None, :]
        # Not from the cache of this multiprocessor, which others' stores do not reach.
        log = tl.load(sums + at + split[:, None] * step + lane[None, :], mask=there, other=float("-inf"),
                      cache_modifier=".cg")  # fmt: skip
        new = tl.maximum(best, tl.max(log, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(best - safe) + tl.sum(tl.exp2(log - safe[None, :]), 0)
        best = new
    return tl.where(best == float("-inf"), 0.0, best), total


@triton.jit
def _merge(partial, sums, at, splits, valid, step, start, best, total, M: tl.constexpr, DIM_PAD: tl.constexpr,
           WIDTH: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """Results of these splits, weighted by their log-sums, WIDTH numbers from `start` on: [M, WIDTH]."""
    lane, dim = tl.arange(0, M), start + tl.arange(0, WIDTH)
    acc = tl.zeros([M, WIDTH], tl.float32)
    for first in range(0, splits, TOGETHER):
        for more in tl.static_range(TOGETHER):  # loads that wait together
            place = at + (first + more) * step + lane
            there = valid & (first + more < splits)
            log = tl.load(sums + place, mask=there, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(partial + place[:, None] * DIM_PAD + dim[None, :], mask=there[:, None], other=0.0,
                           cache_modifier=".cg")  # fmt: skip
            acc += part * tl.exp2(log - best)[:, None]
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["words"])
def attend(q, keys, values, out, items, pages, limits, masks, partial, sums, counts, q_row, q_head, words, scale,
           GROUPS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, REST: tl.constexpr,
           REST_PAD: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
           TOGETHER: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """One item for one group of query heads: rows of a tile x heads of the group, M at most, against its keys.

    Grid (items, GROUPS). q: [rows, heads, DIM + REST] with strides q_row, q_head, 1. REST 0: a group has a KV head of
    its own, keys, values: [locations, GROUPS, DIM]; else all groups share latents, of which values are the first DIM
    numbers, keys: [locations, DIM + REST]. out: [rows, heads * DIM]; pages, limits, masks, items: int64, see tiles.py.
    partial: float32 [splits, GROUPS, M, DIM_PAD], sums: float32 [splits, GROUPS, M], counts: int32 [splits, GROUPS], 0
    before and after. WIDTH: numbers of a row merged at once. scale: of the scores, times log2(e). OFFSET: integers that
    hold every offset in the keys. Items and limits are read ahead of kernels.launch.in_turn.
    """
    group = tl.program_id(1)
    item = items + tl.program_id(0) * 10
    rows = tl.load(item + 1)
    row, length, least = tl.load(item), tl.load(item + 3).to(tl.int32), tl.load(item + 4).to(tl.int32)
    begin, end = tl.load(item + 5).to(tl.int32), tl.load(item + 6).to(tl.int32)
    at, split, splits = tl.load(item + 7).to(tl.int32), tl.load(item + 8).to(tl.int32), tl.load(item + 9).to(tl.int32)
    pages += tl.load(item + 2)
    lane, dim = tl.arange(0, M), tl.arange(0, DIM_PAD)
    own = row + lane // GROUP
    heads = group * GROUP + lane % GROUP
    valid = lane < rows * GROUP
    shape = valid[:, None] & (dim < DIM)[None, :]
    limit = tl.load(limits + own, mask=valid, other=0)
    in_turn(EARLY)
    if rows == 0:
        return
    x_at = q + (own * q_row + heads * q_head)[:, None]
    x = tl.load(x_at + dim[None, :], mask=shape, other=0.0)
    if REST:
        rest = tl.arange(0, REST_PAD)
        x_rest = tl.load(x_at + (DIM + rest)[None, :], mask=valid[:, None] & (rest < REST)[None, :], other=0.0)
        stride = DIM + REST
    else:
        x_rest = x
        stride = GROUPS * DIM
        keys += group * DIM
        values += group * DIM
    mask = masks + own * words

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    full = begin + tl.maximum(tl.minimum(end, least) - begin, 0) // N * N
    for start in tl.range(begin, full, N, num_stages=STAGES):
        top, total, acc = _block(x, x_rest, keys, values, pages, mask, valid, limit, length, start, end, words, stride,
                                 scale, top, total, acc, DIM, DIM_PAD, REST, REST_PAD, PAGE, N, False, PRECISION,
                                 OFFSET)  # fmt: skip
    for start in tl.range(full, end, N, num_stages=1):
        top, total, acc = _block(x, x_rest, keys, values, pages, mask, valid, limit, length, start, end, words, stride,
                                 scale, top, total, acc, DIM, DIM_PAD, REST, REST_PAD, PAGE, N, True, PRECISION,
                                 OFFSET)  # fmt: skip

    total = tl.where(total == 0, 1.0, total)  # rows that see none of these keys
    result = acc / total[:, None]
    target = out + own[:, None] * (GROUPS * GROUP * DIM) + heads[:, None] * DIM
    if splits == 1:
        tl.store(target + dim[None, :], result.to(out.dtype.element_ty), mask=shape)
    else:
        place = ((at + split) * GROUPS + group) * M + lane
        tl.store(partial + place[:, None] * DIM_PAD + dim[None, :], result, mask=valid[:, None])
        tl.store(sums + place, top + tl.log2(total), mask=valid)
        tl.debug_barrier()
        count = counts + at * GROUPS + group
        if tl.atomic_add(count, 1, sem="acq_rel") == splits - 1:
            first = (at * GROUPS + group) * M
            best, whole = _log_sums(sums, first, splits, valid, GROUPS * M, M)
            for lead in tl.static_range(0, DIM_PAD, WIDTH):
                merged = _merge(partial, sums, first, splits, valid, GROUPS * M, lead, best, whole, M, DIM_PAD, WIDTH,
                                TOGETHER)  # fmt: skip
                part = lead + tl.arange(0, WIDTH)[None, :]
                tl.store(target + part, merged.to(out.dtype.element_ty), mask=valid[:, None] & (part < DIM))
            tl.store(count, 0)


@triton.jit(do_not_specialize=["words", "read", "sums_row", "sums_head"])
def join(q, keys, values, first, sums, out, items, pages, limits, masks, q_row, q_head, sums_row, sums_head, read,
         words, scale, unit, GROUPS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
         REST: tl.constexpr, REST_PAD: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
         PRECISION: tl.constexpr, OFFSET: tl.constexpr):  # fmt: skip
    """As attend, of keys above some that were attended to before: the walk goes on from what was found there.

    Grid (items, GROUPS); items: see nodes.py. q and out have the rows of the step; limits and masks those of some
    spans, of which the earlier call had the first `read`. first: [read, heads, DIM], what it returned; sums: its
    log-sums, float32, with strides sums_row and sums_head, times `unit` binary logarithms.
    """
    group = tl.program_id(1)
    item = items + tl.program_id(0) * 7
    row, place, rows = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    pages += tl.load(item + 3)
    begin, length, end = tl.load(item + 4).to(tl.int32), tl.load(item + 5).to(tl.int32), tl.load(item + 6).to(tl.int32)
    lane, dim = tl.arange(0, M), tl.arange(0, DIM_PAD)
    own, at = place + lane // GROUP, row + lane // GROUP
    heads = group * GROUP + lane % GROUP
    valid = lane < rows * GROUP
    shape = valid[:, None] & (dim < DIM)[None, :]
    x_at = q + (at * q_row + heads * q_head)[:, None]
    x = tl.load(x_at + dim[None, :], mask=shape, other=0.0)
    if REST:
        rest = tl.arange(0, REST_PAD)
        x_rest = tl.load(x_at + (DIM + rest)[None, :], mask=valid[:, None] & (rest < REST)[None, :], other=0.0)
        stride = DIM + REST
    else:
        x_rest = x
        stride = GROUPS * DIM
        keys += group * DIM
        values += group * DIM
    limit = tl.load(limits + own, mask=valid, other=0)
    mask = masks + own * words

    some = valid & (own < read)
    top = tl.load(sums + own * sums_row + heads * sums_head, mask=some, other=float("-inf")) * unit
    total = tl.where(some, 1.0, 0.0)
    target = own[:, None] * (GROUPS * GROUP * DIM) + heads[:, None] * DIM + dim[None, :]
    acc = tl.load(first + target, mask=shape & some[:, None], other=0.0).to(tl.float32)
    for start in tl.range(begin, end, N, num_stages=1):
        top, total, acc = _block(x, x_rest, keys, values, pages, mask, valid, limit, length, start, end, words, stride,
                                 scale, top, total, acc, DIM, DIM_PAD, REST, REST_PAD, PAGE, N, True, PRECISION,
                                 OFFSET)  # fmt: skip
    acc /= tl.where(total == 0, 1.0, total)[:, None]
    target = at[:, None] * (GROUPS * GROUP * DIM) + heads[:, None] * DIM + dim[None, :]
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=shape)


@triton.jit
def deal(tables, lengths, chains, write, limits, items, offset, rows, width, count, spare_row, spare, programs,
         PAGE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
         COUNT: tl.constexpr, STEPWISE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """A plan for chains whose lengths only the device knows: what tiles.common and tiles.items make of them.

    Grid (items), more than `rows`, the number of chains; chain i: `count` rows from position lengths[chains[i]] +
    offset on, over the pages tables[chains[i]], of `width`. All int64. write, limits: [rows * count], chain after
    chain; STEPWISE: step after step, each a forward of its own with the same items. items: [grid, FIELDS]. Tiles have
    TILE rows, PARTS of them a chain. BLOCK, programs: see tiles.Grid. TILES, COUNT: padded to powers of two.
    """
    in_turn(EARLY)
    own = tl.program_id(0).to(tl.int64)
    if own < rows:
        row = tl.load(chains + own)
        i = tl.arange(0, COUNT)
        at = tl.load(lengths + row) + offset + i
        real = (at >= 0) & (row != spare_row) & (i < count)
        page = tl.load(tables + row * width + at // PAGE, mask=real, other=0)
        place = i * rows + own if STEPWISE else own * count + i
        tl.store(write + place, tl.where(real, page * PAGE + at % PAGE, spare), mask=i < count)
        tl.store(limits + place, tl.where(real, at + 1, 0), mask=i < count)

    # Every program deals all tiles to items, and writes the one of its own number.
    tile = tl.arange(0, TILES).to(tl.int64)
    there = tile < rows * PARTS
    row = tl.load(chains + tile // PARTS, mask=there, other=spare_row)
    first = tl.load(lengths + row) + offset
    begins = tile % PARTS * TILE
    ends = first + (count if STEPWISE else tl.minimum(begins + TILE, count))
    extent = tl.where(row == spare_row, 0, tl.maximum(ends, 0))
    splits = tl.maximum(1, extent * programs // tl.maximum(1, tl.sum(extent, 0)))
    chunk = tl.maximum(1, (extent + splits * BLOCK - 1) // (splits * BLOCK)) * BLOCK
    splits = tl.where(there, tl.maximum(1, (extent + chunk - 1) // chunk), 0)
    last = tl.cumsum(splits, 0)
    mine = tl.sum(((last <= own) & there).to(tl.int64), 0)
    is_mine = tile == mine
    parts = tl.sum(tl.where(is_mine, splits, 0), 0)
    split = own - tl.sum(tl.where(is_mine, last - splits, 0), 0)
    step = tl.sum(tl.where(is_mine, chunk, 0), 0)
    total = tl.sum(tl.where(is_mine, extent, 0), 0)
    start = tl.sum(tl.where(is_mine, begins, 0), 0)
    chain = mine // PARTS
    item = items + own * 10
    tl.store(item, chain if STEPWISE else chain * count + start)
    tl.store(item + 1, tl.where(mine < rows * PARTS, 1 if STEPWISE else tl.minimum(TILE, count - start), 0))
    tl.store(item + 2, tl.sum(tl.where(is_mine, row * width, 0), 0))
    tl.store(item + 3, total)
    tl.store(item + 4, tl.maximum(0, tl.minimum(total, tl.sum(tl.where(is_mine, first, 0), 0) + start + 1)))
    tl.store(item + 5, split * step)
    tl.store(item + 6, tl.minimum(total, (split + 1) * step))
    tl.store(item + 7, tl.sum(tl.where((tile < mine) & (splits > 1), splits, 0), 0))
    tl.store(item + 8, split)
    tl.store(item + 9, parts)
