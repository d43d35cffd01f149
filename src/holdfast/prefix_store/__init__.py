"""KV pages of prefixes on a disk: shared by processes, kept over restarts, proven when they are read. No torch."""

from holdfast.prefix_store.reading import ReadResult, Ticket
from holdfast.prefix_store.stats import DropReason, MissReason, StoreStats
from holdfast.prefix_store.store import PrefixStore

__all__ = ["DropReason", "MissReason", "PrefixStore", "ReadResult", "StoreStats", "Ticket"]
