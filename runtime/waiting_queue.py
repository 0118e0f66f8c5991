"""The requests that wait for admission, in the order of the scheduling policy."""

from __future__ import annotations

import bisect
from collections import deque

from runtime.request import Request


class WaitingQueue:
    """First come, first served or, with `by_priority`, the smallest priority first and the earlier of equals."""

    def __init__(self, *, by_priority: bool) -> None:
        self.by_priority = by_priority
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def rank(self, request: Request) -> tuple[int, int, int]:
        """What orders requests: the smaller is served sooner, the largest preempted first; children after their root.

        Without priorities the queue itself is in the order of arrival, but for preempted requests, which are first.
        """
        return request.priority if self.by_priority else 0, request.arrival, request.child_index

    def add(self, request: Request) -> None:
        """Queue a new request."""
        if self.by_priority:
            bisect.insort(self._requests, request, key=self.rank)
        else:
            self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """Queue a preempted request: in rank by priority, else before all that wait."""
        if self.by_priority:
            self.add(request)
        else:
            self._requests.appendleft(request)

    def peek(self) -> Request:
        """The request that is served next."""
        return self._requests[0]

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._requests.remove(request)
