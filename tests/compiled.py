"""Every Triton kernel of the package, compiled for a GPU that need not be there.

Triton's interpreter forgives what its compiler does not: a name of two types, a loop it cannot unroll, a shape that is
no power of two. The compiler needs no GPU, only to be told of one. Run as a program, since Triton decides when it is
imported whether it interprets: `python -m tests.compiled`. Ends with an error where a kernel does not compile, is
launched by nothing here, or is compiled anew for other numbers of rows: a server that meets these one by one would stop
for a second each.
"""

from __future__ import annotations

import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from distspec import attention, kernels
from distspec.attention import Places, Span
from distspec.attention.nodes import NATURAL, Nodes
from distspec.attention.triton import TritonBackend
from distspec.kernels.accept import accept_and_move
from distspec.kernels.activation import silu_mul
from distspec.kernels.best import best_whole
from distspec.kernels.edit import add_bias_, mask_, penalize_
from distspec.kernels.latent import turn_and_write_latents
from distspec.kernels.linear import Norm, linear, linear_prepared
from distspec.kernels.norm import add_rms_norm, rms_norm
from distspec.kernels.nucleus import draw_nucleus
from distspec.kernels.pages import gather_pages, scatter_pages
from distspec.kernels.pull import pull_pages, wait_for
from distspec.kernels.rolling import make_up, settle, spread
from distspec.kernels.rope import HeadNorms, rope_and_write
from distspec.kernels.sample import draw_whole
from distspec.kernels.tell import tell_whole
from distspec.kernels.tiles import Tile
from distspec.kernels.truncate import Limits, kept
from distspec.kv.pool import KVPool
from distspec.sampling.edits import IN_PROMPT

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
"""Of a program, at most, on that GPU; more is refused when it is launched."""
VOCAB = 151936
ROWS = 5
GREEDY_BELOW = 1e-5


class _Told:
    """Of a Triton driver what compiling asks."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def only_compile() -> dict[tuple[str, str], set[str]]:
    """From now on a launch compiles, and computes nothing. What was compiled, by kernel and what it is compiled for."""
    launch: Callable[..., Any] = JITFunction.run
    found = defaultdict[tuple[str, str], set[str]](set)

    def compiles(self: JITFunction[Any], *args: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(self, *args, warmup=True, **options)
        constants = {name: value for name, value in options.items() if name not in ("grid", "stream")}
        found[self.__module__ + "." + self.__name__, str(sorted(constants.items(), key=str))].add(compiled.hash)
        if compiled.metadata.shared > SHARED_BYTES:
            raise SystemExit(f"{self.__name__} wants {compiled.metadata.shared} bytes of shared memory")
        if compiled.metadata.launch_pdl and writes_too_soon(compiled.asm["ptx"]):
            raise SystemExit(f"{self.__name__} may start early, and writes before it is its turn")
        return compiled

    JITFunction.run = compiles
    driver.set_active(_Told())
    return found


def writes_too_soon(code: str) -> bool:
    """Whether something is written ahead of the wait for the kernel before, or without one."""
    ahead, wait, _ = code.partition("griddepcontrol.wait")
    return not wait or re.search(r"\b(st|atom|red)\.\S*global", ahead) is not None


def integers(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def halves(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def draws() -> None:
    logits, keys, reals = torch.zeros(ROWS, VOCAB), integers(ROWS, 4), torch.ones(ROWS, 3)
    temperature, top_p, min_p = reals.unbind(1)
    limits = Limits(keys[:, 0], top_p, min_p, any_top_k=True, any_top_p=True)
    stays = kept(logits, temperature, limits, GREEDY_BELOW)
    for some in (None, stays):
        draw_whole(logits, temperature, keys[:, 1:], GREEDY_BELOW, some)
    draw_nucleus(logits, temperature, keys[:, 1:], top_p, min_p, GREEDY_BELOW)
    best_whole(logits, temperature, keys[:, 1:], GREEDY_BELOW, 5)
    for most in (0, 20):
        tell_whole(logits, integers(ROWS), most)


def edits() -> None:
    logits, rows = torch.zeros(ROWS, VOCAB), integers(3)
    mask_(logits, rows, torch.zeros(3, -(-VOCAB // 32), dtype=torch.int32))
    add_bias_(logits, rows, rows, integers(4, 7), torch.zeros(4, 7))
    seen = torch.zeros(4, VOCAB, dtype=torch.int32)
    for depth in (0, 1, 7):
        penalize_(logits, rows, rows, integers(3, depth), torch.zeros(4, 3), seen, IN_PROMPT)


def rounds() -> None:
    for stepwise in (False, True):
        spread(integers(9), integers(9, 3), torch.zeros(9, 3), integers(4), -1, 3, stepwise)
    settle(integers(9), integers(9, 2), integers(4), integers(4, 3), integers(4, 3))
    for least in (None, 0, 2**63 + 5):
        make_up(integers(10, 4), integers(10), VOCAB, least)
    tree = integers(3, 7)
    accept_and_move(tree, tree, integers(3, 8), tree, tree, halves(4, 100, 1024))


def layers() -> None:
    x, norm, inputs, outputs = halves(3, 1024), Norm(halves(1024), 1e-6), 1024, 520
    rms_norm(x, norm.weight, norm.eps)
    add_rms_norm(x, x, norm.weight, norm.eps)
    silu_mul(halves(3, 2 * outputs))
    one, some, shared = Tile(1, 4, 1024, 1, 1, 4), Tile(16, 64, 64, 1, 3, 4), Tile(16, 16, 64, 4, 2, 4)
    apart = replace(some, apart=3)
    linear(x[:1], halves(outputs, inputs), halves(outputs), norm=norm, shape=one)
    linear(x, halves(2 * outputs, inputs), gated=True, shape=some)
    linear(x, halves(outputs, inputs), out_dtype=torch.float32, shape=some)
    then = Norm(halves(outputs), 1e-6)
    for shape in (some, shared, apart):
        _, ready = linear_prepared(x, halves(outputs, inputs), None, halves(3, outputs), then, shape)
        linear(ready, halves(inputs, outputs), shape=shape)
    heads, kv_heads, dim = 16, 8, 128
    qkv, table = halves(3, (heads + 2 * kv_heads) * dim), halves(2, 100, dim)
    keys, values = halves(2, 50, kv_heads, dim)
    for norms in (None, HeadNorms(halves(dim), halves(dim), 1e-6)):
        rope_and_write(qkv, table, integers(3), integers(3), keys, values, norms)
    rank, turns = 512, 64
    parts = halves(heads, 3, rank), halves(3, heads, turns), halves(3, rank + turns), halves(rank)
    where = halves(2, 3, 1, turns), integers(3), halves(50, 1, rank + turns)
    turn_and_write_latents(*parts, *where, scale=0.1, eps=1e-6)


def pages() -> None:
    for values in (0, 1024):
        data, features = halves(2, 2, 33, 8, 128), halves(33, values)
        scatter_pages(data, features, integers(7), gather_pages(data, features, integers(7)))
        pull_pages(data, features, ([0, 1], 3, 16), [1 << 40, 1 << 41], 49, ([2, 0], 0, 16), 7)
        word = torch.empty(1, dtype=torch.int64)
        wait_for(1 << 40, 3, word, word)


def any_rows() -> None:
    """Of one model, whatever rows a step has, and wherever in the one copy of a step its integers lie."""
    dim, width = 128, 3 * 8 * 128
    table, places, norm = halves(2, 100, dim), (halves(50, 8, dim), halves(50, 8, dim)), halves(512)
    seen, data, features = torch.zeros(4, VOCAB, dtype=torch.int32), halves(2, 2, 33, 8, 128), halves(33, 1024)
    for count, shift in product((1, 2, 3, 16, 17), (0, 1)):
        rows, logits = integers(count + 1)[shift:][:count], torch.zeros(count, VOCAB)
        rope_and_write(halves(count, width), table, rows, rows, *places, None)
        parts = halves(16, count, 512), halves(count, 16, 64), halves(count, 576), norm
        turn_and_write_latents(*parts, halves(2, 3, 1, 64), rows, halves(50, 1, 576), scale=0.1, eps=1e-6)
        mask_(logits, rows, torch.zeros(count, -(-VOCAB // 32), dtype=torch.int32))
        for most in (5, 8):
            add_bias_(logits, rows, rows, integers(4, most), torch.zeros(4, most))
        penalize_(logits, rows, rows, integers(count + 1)[shift:][:count, None], torch.zeros(4, 3), seen, IN_PROMPT)
        keys, (temperature, top_p, min_p) = integers(count, 4), torch.ones(count, 3).unbind(1)
        limits = Limits(keys[:, 0], top_p, min_p, any_top_k=True, any_top_p=True)
        for stays in (None, kept(logits, temperature, limits, GREEDY_BELOW)):
            draw_whole(logits, temperature, keys[:, 1:], GREEDY_BELOW, stays)
        draw_nucleus(logits, temperature, keys[:, 1:], top_p, min_p, GREEDY_BELOW)
        best_whole(logits, temperature, keys[:, 1:], GREEDY_BELOW, 3)
        tell_whole(logits, integers(count), 5)
        scatter_pages(data, features, integers(count), gather_pages(data, features, integers(count)))
        spread(integers(99), integers(99, 3), torch.zeros(99, 3), integers(count), -1, 3, False)
        settle(integers(99), integers(99, 2), integers(count), integers(count, 3), integers(count, 3))
        make_up(integers(count, 4), integers(count), VOCAB, 0)
        tree = integers(count, 7)
        accept_and_move(tree, tree, integers(count, 8), tree, tree, halves(4, 100, 1024))


def any_spans() -> None:
    """Likewise: what a step looks at lies in one copy, of any lengths."""
    pool = KVPool(1, 64, 8, 128, dtype=torch.bfloat16, device=torch.device("cpu"))
    backend, nodes = TritonBackend(pool, 16, 16), Nodes(pool, 16, 16)
    for count, pages in product((1, 2, 3), (1, 2)):
        trees = [Span([0] * pages, 10, 1, ([10], [10, 11]), [9, 10, 11]) for _ in range(count)]
        rows = 3 * count
        backend.read(backend.plan(trees), 0, halves(rows, 16, 128))
        first = halves(rows, 16, 128)
        found = first, torch.zeros(16, rows).t()
        nodes.read(nodes.plan(trees, [3 * i for i in range(count)]), 0, halves(rows, 16, 128), found, NATURAL, first)


def attends(heads: int, kv_heads: int, dim: int, latent: int = 0) -> None:
    """Chains that the device plans, short and long, fewer than it has multiprocessors and more, and trees, whole and in
    two parts."""
    pool = KVPool(1, 64, kv_heads, dim, latent=latent, dtype=torch.bfloat16, device=torch.device("cpu"))
    backend = TritonBackend(pool, 16, heads)
    places = Places(integers(3, 4), integers(3), integers(2), 0)
    backend.steps(places, 3)
    tree = Span([0, 1], 10, 1, ([10], [10, 11]), [9, 10, 11])
    backend.read(backend.plan([tree]), 0, halves(3, heads, dim))
    for chains, count in ((2, 1), (2, 2), (2, 12), (2, 24), (2, 64), (9, 1), (9, 12)):
        plan = backend.chains(replace(places, rows=integers(chains)), count)
        backend.read(plan, 0, halves(chains * count, heads, dim))
    nodes = Nodes(pool, 16, heads)
    for count in (2, 30):
        span = Span([0, 1], 1, 1, tuple([1 + node] for node in range(count)), [])
        first = halves(count + 1, heads, latent or dim)
        found = first, torch.zeros(heads, count + 1).t()
        nodes.read(nodes.plan([span], [0]), 0, halves(count + 1, heads, dim), found, NATURAL, first)


def never_compiled() -> list[str]:
    """Kernels, and what they call, that were in nothing that was compiled."""
    found = []
    names = [f"{kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)]
    for name in (*names, f"{attention.__name__}.kernels"):
        own = [each for each in vars(import_module(name)).values() if isinstance(each, JITFunction)]
        found += [f"{name}.{each.__name__}" for each in own if each.__module__ == name and each.hash is None]
    return found


def main() -> None:
    found = only_compile()
    any_rows()
    any_spans()
    if anew := [kernel for kernel, hashes in found.items() if len(hashes) > 1]:
        raise SystemExit(f"compiled anew for other rows: {anew}")
    draws()
    edits()
    rounds()
    layers()
    pages()
    attends(2, 1, 128)
    attends(16, 1, 576, latent=512)
    if missed := never_compiled():
        raise SystemExit(f"launched by nothing here: {missed}")


if __name__ == "__main__":
    main()
