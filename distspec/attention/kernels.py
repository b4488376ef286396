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
def _queries(q, row, head, valid, q_row, q_head, DIM: tl.constexpr, DIM_PAD: tl.constexpr, REST: tl.constexpr,
             REST_PAD: tl.constexpr):  # fmt: skip
    """Of these rows and heads [M] the first DIM numbers [M, DIM_PAD] and the REST behind them [M, REST_PAD]. REST 0:
    the first ones twice."""
    dim = tl.arange(0, DIM_PAD)
    at = q + (row * q_row + head * q_head)[:, None]
    x = tl.load(at + dim[None, :], mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    if REST:
        rest = tl.arange(0, REST_PAD)
        return x, tl.load(at + (DIM + rest)[None, :], mask=valid[:, None] & (rest < REST)[None, :], other=0.0)
    else:
        return x, x


@triton.jit
def _pages(pages, start, end, N: tl.constexpr, PAGE: tl.constexpr):
    """The pages of N keys from `start` on, of those below `end`, each in a low and a high half.

    Whole numbers of pages Triton would fetch through shared memory, a block ahead, and then not the keys, which depend
    on them: that is what it does to loads of 32 bits and more.
    """
    lane = tl.arange(0, N)
    # `start` is a multiple of N: one division, mostly.
    index = start // PAGE + lane // PAGE if N % PAGE == 0 else (start + lane) // PAGE
    halves = pages.to(tl.pointer_type(tl.uint16), bitcast=True) + index * 4
    there = start + lane < end
    return tl.load(halves, mask=there, other=0), tl.load(halves + 1, mask=there, other=0)


@triton.jit
def _places(low, high, start, stride, N: tl.constexpr, PAGE: tl.constexpr, OFFSET: tl.constexpr):
    """Where N keys from `start` on begin, in these pages."""
    page = low.to(OFFSET) | (high.to(OFFSET) << 16)
    lane = tl.arange(0, N)
    if N % PAGE == 0:
        return page * (PAGE * stride) + lane % PAGE * stride
    else:
        return (page * PAGE + (start + lane) % PAGE) * stride


@triton.jit
def _fetch(base, places, there, DIM: tl.constexpr, DIM_PAD: tl.constexpr, MASKED: tl.constexpr):
    """DIM numbers from each of these places on [N, DIM_PAD]. MASKED: only where they are there."""
    dim = tl.arange(0, DIM_PAD)
    at = base + places[:, None] + dim[None, :]
    if MASKED:
        return tl.load(at, mask=there[:, None] & (dim < DIM)[None, :], other=0.0)
    elif DIM != DIM_PAD:
        return tl.load(at, mask=(dim < DIM)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _found(keys, values, places, there, DIM: tl.constexpr, DIM_PAD: tl.constexpr, REST: tl.constexpr,
           REST_PAD: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """What these places hold: keys and values [N, DIM_PAD]; or, of latents, what is key and value, and the rest of the
    key [N, REST_PAD]."""
    k = _fetch(keys, places, there, DIM, DIM_PAD, MASKED)
    if REST:
        return k, _fetch(keys + DIM, places, there, REST, REST_PAD, MASKED)
    else:
        return k, _fetch(values, places, there, DIM, DIM_PAD, MASKED)


@triton.jit
def _step(x, x_rest, k, other, seen, scale, top, total, acc, REST: tl.constexpr, MASKED: tl.constexpr,
          PRECISION: tl.constexpr):  # fmt: skip
    """One step of the online softmax, over what _found found. MASKED: rows see only some of it, seen [M, N]."""
    scores = tl.dot(x, tl.trans(k), input_precision=PRECISION)
    if REST:
        scores = tl.dot(x_rest, tl.trans(other), scores, input_precision=PRECISION)
        v = k
    else:
        v = other
    if MASKED:
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
def _last(x, x_rest, keys, values, pages, limit, masks, valid, begin, length, end, words, stride, scale, top, total,
          acc, DIM: tl.constexpr, DIM_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
          PAGE: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, OFFSET: tl.constexpr):  # fmt: skip
    """The walk from `begin` to `end` where rows see different keys: those below their limit, and of the scratch, which
    begins at `length`, those in their masks. N: keys read at once, up to 64.

    Blocks are laid so that one of them begins with the scratch: a row's bits of a block are then in one word, or two.
    """
    lane = tl.arange(0, N)
    for start in tl.range(begin - ((begin - length) & (N - 1)), end, N, num_stages=1):
        index, above = start + lane, start - length
        there = (index >= begin) & (index < end)
        word = above >> 5
        bits = tl.load(masks + word, mask=valid & (above >= 0), other=0) >> (above & 31)
        if N > 32:
            bits |= tl.load(masks + word + 1, mask=valid & (above >= 0) & (word + 1 < words), other=0) << 32
        seen = (index[None, :] < limit[:, None]) | (((bits[:, None] >> lane[None, :]) & 1) == 1)
        page = tl.load(pages + index // PAGE, mask=there, other=0).to(OFFSET)
        places = (page * PAGE + index % PAGE) * stride
        k, other = _found(keys, values, places, there, DIM, DIM_PAD, REST, REST_PAD, True)
        top, total, acc = _step(x, x_rest, k, other, seen & there[None, :], scale, top, total, acc, REST, True,
                                PRECISION)  # fmt: skip
    return top, total, acc


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


@triton.jit
def _deliver(out, partial, sums, counts, top, total, acc, own, heads, valid, group, at, split, splits,
             GROUPS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, M: tl.constexpr,
             WIDTH: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """What a walk has found to where it belongs: of a tile with one split the result; else this split's part, and the
    split that ends last merges all."""
    lane, dim = tl.arange(0, M), tl.arange(0, DIM_PAD)
    total = tl.where(total == 0, 1.0, total)  # rows that see none of these keys
    result = acc / total[:, None]
    target = out + own[:, None] * (GROUPS * GROUP * DIM) + heads[:, None] * DIM
    if splits == 1:
        tl.store(target + dim[None, :], result.to(out.dtype.element_ty), mask=valid[:, None] & (dim < DIM)[None, :])
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


@triton.jit(do_not_specialize=["words"], do_not_specialize_on_alignment=["items", "pages", "limits", "masks"])
def attend(q, keys, values, out, items, pages, limits, masks, partial, sums, counts, q_row, q_head, words, scale,
           GROUPS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, REST: tl.constexpr,
           REST_PAD: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LAST: tl.constexpr,
           WIDTH: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
           OFFSET: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """One item for one group of query heads: rows of a tile x heads of the group, M at most, against its keys.

    Grid (items, GROUPS). q: [rows, heads, DIM + REST] with strides q_row, q_head, 1. REST 0: a group has a KV head of
    its own, keys, values: [locations, GROUPS, DIM]; else all groups share latents, of which values are the first DIM
    numbers, keys: [locations, DIM + REST]. out: [rows, heads * DIM]; pages, limits, masks, items: int64, see tiles.py.
    partial: float32 [splits, GROUPS, M, DIM_PAD], sums: float32 [splits, GROUPS, M], counts: int32 [splits, GROUPS], 0
    before and after. N: keys read at once where all rows see them; splits begin at multiples of it. LAST: elsewhere, up
    to 64. WIDTH: numbers of a row merged at once. scale: of the scores, times log2(e). OFFSET: integers that hold every
    offset in the keys. Items, limits and the first pages are read ahead of kernels.launch.in_turn.
    """
    group = tl.program_id(1)
    item = items + tl.program_id(0) * 10
    rows = tl.load(item + 1)
    row, length, least = tl.load(item), tl.load(item + 3).to(tl.int32), tl.load(item + 4).to(tl.int32)
    begin, end = tl.load(item + 5).to(tl.int32), tl.load(item + 6).to(tl.int32)
    at, split, splits = tl.load(item + 7).to(tl.int32), tl.load(item + 8).to(tl.int32), tl.load(item + 9).to(tl.int32)
    pages += tl.load(item + 2)
    lane = tl.arange(0, M)
    own = row + lane // GROUP
    heads = group * GROUP + lane % GROUP
    valid = lane < rows * GROUP
    limit = tl.load(limits + own, mask=valid, other=0)
    full = begin + tl.maximum(tl.minimum(end, least) - begin, 0) // N * N
    low, high = _pages(pages, begin, full, N, PAGE)
    in_turn(EARLY)
    if rows == 0:
        return
    x, x_rest = _queries(q, own, heads, valid, q_row, q_head, DIM, DIM_PAD, REST, REST_PAD)
    if REST:
        stride = DIM + REST
    else:
        stride = GROUPS * DIM
        keys += group * DIM
        values += group * DIM

    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DIM_PAD], tl.float32)
    for start in tl.range(begin, full, N, num_stages=STAGES):
        places = _places(low, high, start, stride, N, PAGE, OFFSET)
        k, other = _found(keys, values, places, None, DIM, DIM_PAD, REST, REST_PAD, False)
        low, high = _pages(pages, start + N, full, N, PAGE)
        top, total, acc = _step(x, x_rest, k, other, None, scale, top, total, acc, REST, False, PRECISION)
    top, total, acc = _last(x, x_rest, keys, values, pages, limit, masks + own * words, valid, full, length, end, words,
                            stride, scale, top, total, acc, DIM, DIM_PAD, REST, REST_PAD, PAGE, LAST, PRECISION,
                            OFFSET)  # fmt: skip

    _deliver(out, partial, sums, counts, top, total, acc, own, heads, valid, group, at, split, splits,
             GROUPS, GROUP, DIM, DIM_PAD, M, WIDTH, TOGETHER)  # fmt: skip


@triton.jit(
    do_not_specialize=["words", "read", "sums_row", "sums_head"],
    do_not_specialize_on_alignment=["items", "pages", "limits", "masks", "sums"],
)
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
    x, x_rest = _queries(q, at, heads, valid, q_row, q_head, DIM, DIM_PAD, REST, REST_PAD)
    if REST:
        stride = DIM + REST
    else:
        stride = GROUPS * DIM
        keys += group * DIM
        values += group * DIM
    limit = tl.load(limits + own, mask=valid, other=0)

    some = valid & (own < read)
    top = tl.load(sums + own * sums_row + heads * sums_head, mask=some, other=float("-inf")) * unit
    total = tl.where(some, 1.0, 0.0)
    target = own[:, None] * (GROUPS * GROUP * DIM) + heads[:, None] * DIM + dim[None, :]
    acc = tl.load(first + target, mask=shape & some[:, None], other=0.0).to(tl.float32)
    top, total, acc = _last(x, x_rest, keys, values, pages, limit, masks + own * words, valid, begin, length, end,
                            words, stride, scale, top, total, acc, DIM, DIM_PAD, REST, REST_PAD, PAGE, N, PRECISION,
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
