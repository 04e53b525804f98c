"""Exact ranks by counting: a retrieval problem goes in, the ranks of its queries come out.

from retrieval.ranking import count_ranks
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrieval.ranking.ranks import Ranks, count_ranks

__all__ = ["Ranks", "count_ranks"]


def __getattr__(name: str) -> Any:
    # Resolved on first use: the kernels take a second to load, and checks of data need none.
    if name in __all__:
        from retrieval.ranking import ranks

        return getattr(ranks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
