"""FairQueue: decides which tenant's item is next. A bounded queue in which tenants take turns."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Tenants are served in turn, one item each. Items of one tenant keep their order.

    When the queue is full, the tenant with the most items loses one. So no tenant can block others.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._size = 0
        self._by_tenant: OrderedDict[str, OrderedDict[int, T]] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def push(self, tenant: str, item: T) -> T | None:
        """Add an item. If the queue is full, returns the dropped item: this or another's last."""
        dropped = None
        if self._size < self._max_size:
            self._size += 1
        else:
            greediest = max(self._by_tenant.values(), key=len)
            if len(greediest) <= len(self._by_tenant.get(tenant, ())) + 1:
                return item
            _, dropped = greediest.popitem(last=True)
        self._by_tenant.setdefault(tenant, OrderedDict())[id(item)] = item
        return dropped

    def next_tenant(self) -> str | None:
        """The tenant whose turn it is, or None."""
        return next(iter(self._by_tenant), None)

    def pop(self) -> T | None:
        """Remove and return the next item of the tenant whose turn it is, or None."""
        if not self._by_tenant:
            return None
        tenant, items = next(iter(self._by_tenant.items()))
        _, item = items.popitem(last=False)
        self._size -= 1
        if items:
            self._by_tenant.move_to_end(tenant)
        else:
            del self._by_tenant[tenant]
        return item

    def remove(self, tenant: str, item: T) -> bool:
        """Remove an item from any position. Returns False if it is not in the queue."""
        items = self._by_tenant.get(tenant)
        if items is None or items.pop(id(item), None) is None:
            return False
        self._size -= 1
        if not items:
            del self._by_tenant[tenant]
        return True

    def clear(self) -> list[T]:
        """Empty the queue and return its items."""
        left = [item for items in self._by_tenant.values() for item in items.values()]
        self._by_tenant.clear()
        self._size = 0
        return left
