"""The books of the KV cache: groups, block pool, prefix index. No torch, no tensors."""

from holdfast.kvcache.groups import KVGroup, KVLayout, form_groups
from holdfast.kvcache.manager import KVCache, Prefix, SequenceBlocks
from holdfast.kvcache.pool import NULL_PAGE, Block, BlockPool, BlockState, Tier
from holdfast.kvcache.tier_records import FoundBelow, StoredPages, TierLimits
from holdfast.kvcache.tiers import LowerTiers

__all__ = [
    "NULL_PAGE",
    "Block",
    "BlockPool",
    "BlockState",
    "FoundBelow",
    "KVCache",
    "KVGroup",
    "KVLayout",
    "LowerTiers",
    "Prefix",
    "SequenceBlocks",
    "StoredPages",
    "Tier",
    "TierLimits",
    "form_groups",
]
