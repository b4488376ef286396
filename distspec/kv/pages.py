"""Pages of the KV cache: which are free, and how many hold each of the others.

Knows page numbers and reference counts. Does not know tokens, tensors, or who the holders are.
"""

from __future__ import annotations

from collections.abc import Iterable

from distspec.errors import OutOfPages


class PageAllocator:
    """Reference-counted pages 0 .. num_pages-1 of page_size positions each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        # Lowest numbers on top: a fresh pool hands out neighbouring pages in order.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, one reference each. Raises OutOfPages; then nothing is allocated."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page. Raises ValueError for a free page."""
        for page in pages:
            if self._references[page] < 1:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page; at none it is free. Raises ValueError for a free page."""
        freed = []
        for page in pages:
            if self._references[page] < 1:
                raise ValueError(f"page {page} is free already")
            self._references[page] -= 1
            if not self._references[page]:
                freed.append(page)
        self._free.extend(reversed(freed))
