"""Calls in threads that never hold the end of the process; no torch, since reward servers may have none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def background(call: Callable[[], T]) -> Future[T]:
    """The value of `call` to come, from a daemon thread."""
    answer: Future[T] = Future()
    Thread(target=_settle, args=(answer, call), daemon=True).start()
    return answer


def in_parallel(call: Callable[[S], T], items: Iterable[S], threads: int) -> list[T]:
    """`call` of each item, in order, by so many threads; after an error those not begun are given up."""
    todo = deque((Future[T](), partial(call, item)) for item in items)
    answers = [answer for answer, _ in todo]
    for _ in range(min(threads, len(todo))):
        Thread(target=_work, args=(todo,), daemon=True).start()
    try:
        return [answer.result() for answer in answers]
    finally:
        todo.clear()


def _work(todo: deque[tuple[Future[T], Callable[[], T]]]) -> None:
    while True:
        try:
            answer, call = todo.popleft()
        except IndexError:
            return
        _settle(answer, call)


def _settle(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # a SystemExit included
        answer.set_exception(error)
