"""Copies of frozen weights in another order, kept as long as the weights are what they were."""

import weakref
from typing import NamedTuple

import torch
import torch.nn.utils.parametrize
from torch.multiprocessing.reductions import StorageWeakRef

ATTRIBUTE = "_tidegate_weight_cache"  # where a module has its cache
SAMPLES = 512  # numbers of a weight that are compared on every use


class Entry(NamedTuple):
    """A copy, and what the weight was when it was made."""

    weight: weakref.ref
    storage: StorageWeakRef  # as long as it is held no other storage has its address
    facts: tuple
    copy: torch.Tensor

    def of(self, weight, facts):
        same = self.weight() is weight and not self.storage.expired()
        return same and self.storage == StorageWeakRef(weight.untyped_storage()) and self.facts == facts


def _facts(weight):
    """Where the numbers stand, torch's count of changes, and a sample: fused optimizers and .data do not count."""
    version = None if weight.is_inference() else weight._version
    step = max(1, weight.numel() // SAMPLES)
    flat = weight.detach().as_strided((weight.numel(),), (1,), weight.storage_offset())  # any order will do
    sample = flat[::step].contiguous().view(torch.uint8).numpy().tobytes()
    return weight.data_ptr(), tuple(weight.shape), weight.stride(), weight.dtype, weight.device, version, sample


class WeightCache:
    """One a module. An entry is used only for the very tensor it was made from, unchanged as far as can be seen.

    What must not be kept is not: a weight that requires a gradient, a tensor of a subclass (DTensor, quantised), one
    that was computed. A write through .data that misses the sample needs tidegate.invalidate(module).
    """

    def __init__(self):
        self._entries = {}

    @property
    def bytes(self):
        return sum(entry.copy.numel() * entry.copy.element_size() for entry in self._entries.values())

    def clear(self):
        self._entries.clear()

    def get(self, name, weight, make):
        """make(weight), from the cache if it is there; None if this weight must not be kept."""
        if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.requires_grad or not weight.is_leaf:
            self._entries.pop(name, None)
            return None
        facts, entry = _facts(weight), self._entries.get(name)
        if entry is None or not entry.of(weight, facts):
            self._entries.pop(name, None)  # before the new one is made: both would be in memory
            with torch.no_grad():
                copy = make(weight.detach())
            entry = Entry(weakref.ref(weight), StorageWeakRef(weight.untyped_storage()), facts, copy)
            self._entries[name] = entry
        return entry.copy

    def __deepcopy__(self, memo):
        return WeightCache()

    def __reduce__(self):
        return dict, ()  # a saved model has no copies, and loads without tidegate


def cache_of(module):
    cache = module.__dict__.get(ATTRIBUTE)
    return cache if isinstance(cache, WeightCache) else None


def is_computed(module):
    """Whether a module's weights are made anew for every call (PEFT's merged ones, parametrizations)."""
    return torch.nn.utils.parametrize.is_parametrized(module)


def invalidate(module: torch.nn.Module) -> int:
    """Drops the copies of weights in a module and below it: call it after writing to frozen weights through .data.

    Returns how many bytes were freed.
    """
    from tidegate.patch.resolve import core

    caches = [cache for part in core(module).modules() if (cache := cache_of(part)) is not None]
    freed = sum(cache.bytes for cache in caches)
    for cache in caches:
        cache.clear()
    return freed
