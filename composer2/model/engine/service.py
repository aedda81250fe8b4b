"""The engine on asyncio: many episodes await tokens, one driver task steps the engine for all of them.

    async with AsyncSampler(engine) as sampler:
        async with sampler.episode():
            generation = await sampler.generate(token_ids, params, session="s", group="g", seed=0)

In: awaited `generate` calls. Out: one `Generation` each, as soon as it ends; implements `types.Sampler`.

Source: report §4.1, §6.2; rows A1 A3 I1.
Choice: with `lockstep` a run is the same bit for bit, however long tools take. A wave of decoding begins only when
every live episode waits for tokens; its requests enter sorted by (group, session) and nothing joins until all of them
end. Slots released meanwhile are freed before the next wave. What is in each batch then depends on the episodes alone,
provided that episodes register before the first of them waits, and release their sessions before they unregister.
Choice: no thread. A step blocks the loop for its milliseconds; tools run in other processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from torch import Tensor

from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Request
from composer2.types import Generation, SamplingParams


class AsyncSampler:
    """Implements `types.Sampler`. Use as an async context manager: entering starts the driver, leaving stops it."""

    def __init__(
        self, engine: Engine, *, lockstep: bool = False, before_step: Callable[[], None] | None = None
    ) -> None:
        """`before_step` is called before every engine step, for example to look for new weights."""
        self.engine = engine
        self.lockstep = lockstep
        self.before_step = before_step
        self.num_live_episodes = 0
        self._inbox: list[tuple[Request, asyncio.Future[Generation]]] = []
        self._futures: dict[int, asyncio.Future[Generation]] = {}
        self._released: list[str] = []
        self._updates: list[tuple[Callable[[], None], asyncio.Future[None]]] = []
        self._changed = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._open_gate = asyncio.Event()
        self._open_gate.set()

    async def __aenter__(self) -> AsyncSampler:
        if self._driver is not None:
            raise RuntimeError("this sampler runs already")
        self._failure = None
        self._driver = asyncio.create_task(self._drive())
        self._driver.add_done_callback(self._driver_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        driver, self._driver = self._driver, None
        assert driver is not None
        driver.cancel()
        await asyncio.wait({driver})
        await asyncio.sleep(0)  # lets the end reach whoever still waits

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Register one episode for as long as it may ask for tokens; waits while new weights are being let in."""
        while not self._open_gate.is_set():
            await self._open_gate.wait()
        self.num_live_episodes += 1
        try:
            yield
        finally:
            self.num_live_episodes -= 1
            self._changed.set()

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, session: str, group: str, seed: int
    ) -> Generation:
        """Continue `token_ids`. ValueError if the context does not fit; whatever fails the engine is raised here."""
        self._check_running()
        request = Request(token_ids=tuple(token_ids), params=params, session=session, group=group, seed=seed)
        self.engine.check(request)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._inbox.append((request, future))
        self._changed.set()
        return await future  # a cancelled waiter cancels the future, and the driver then drops the request

    def release(self, session: str) -> None:
        """Forget a session; with `lockstep`, when the wave in progress has ended."""
        if self.lockstep and self.engine.has_work:
            self._released.append(session)
        else:
            self.engine.release(session)

    async def load_weights(
        self,
        state: Mapping[str, Tensor],
        version: int,
        *,
        cache: Literal["keep", "recompute"] = "keep",
        in_flight: bool = True,
    ) -> None:
        """New weights: at once, in the middle of generations, or (not `in_flight`) when no episode is live.

        In the second case new episodes wait meanwhile, so every rollout carries exactly one policy version.
        """
        self._check_running()
        if in_flight:
            self.engine.load_weights(state, version, cache)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open_gate.clear()
        self._updates.append((lambda: self.engine.load_weights(state, version, cache), done))
        self._changed.set()
        await done

    # -----------------------------------------------------------------------------------------------------------------
    # Driver

    async def _drive(self) -> None:
        while True:
            await self._wait_for_work()
            if self.before_step is not None:
                self.before_step()
            self._drop_cancelled()
            for done in self.engine.step():
                future = self._futures.pop(done.request_id, None)
                if future is not None and not future.done():
                    future.set_result(done.generation)
            await asyncio.sleep(0)

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        """Whoever waits for tokens must hear that none will come, and why."""
        error = None if driver.cancelled() else driver.exception()
        self._failure = error or RuntimeError("the sampler was stopped")
        waiting: list[asyncio.Future[Any]] = [
            *self._futures.values(),
            *(future for _, future in self._inbox),
            *(done for _, done in self._updates),
        ]
        for future in waiting:
            if not future.done():
                future.set_exception(self._failure)
        self._futures.clear()
        self._inbox.clear()
        self._updates.clear()
        self._open_gate.set()

    async def _wait_for_work(self) -> None:
        """Returns once the engine has something to do; moves requests from the inbox into it."""
        while True:
            self._changed.clear()
            if not self.engine.has_work:
                for session in self._released:
                    self.engine.release(session)
                self._released.clear()
                self._update_when_quiet()
            self._inbox = [(request, future) for request, future in self._inbox if not future.done()]
            if self._inbox and (not self.lockstep or self._is_wave_complete()):
                inbox, self._inbox = self._inbox, []
                if self.lockstep:
                    inbox.sort(key=lambda pair: (pair[0].group, pair[0].session))
                for request, future in inbox:
                    self._submit(request, future)
            if self.engine.has_work:
                return
            await self._changed.wait()

    def _is_wave_complete(self) -> bool:
        return not self.engine.has_work and len(self._inbox) >= self.num_live_episodes

    def _submit(self, request: Request, future: asyncio.Future[Generation]) -> None:
        try:
            self._futures[self.engine.submit(request)] = future
        except ValueError as error:  # a second request of a session: the caller's mistake, not the engine's
            future.set_exception(error)

    def _drop_cancelled(self) -> None:
        for request_id in [request_id for request_id, future in self._futures.items() if future.cancelled()]:
            self.engine.cancel(request_id)
            del self._futures[request_id]

    def _update_when_quiet(self) -> None:
        """Carry out postponed weight updates once no episode is live, then let new episodes in."""
        if not self._updates or self.num_live_episodes or self._inbox:
            return
        for update, done in self._updates:
            try:
                update()
            except ValueError as error:  # weights that do not fit: the caller's mistake
                done.set_exception(error)
            else:
                done.set_result(None)
        self._updates.clear()
        self._open_gate.set()

    def _check_running(self) -> None:
        if self._driver is None or self._failure is not None:
            raise RuntimeError("the sampler is not running") from self._failure
