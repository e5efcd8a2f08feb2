"""An environment for tests, and an engine that says what a script has it say."""

import contextlib
import types

from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import FinishEvent, TokenEvent
from train.agents import schemas
from train.agents.environment import Grade, Task
from train.agents.tools import ToolError

PRICES = {"pear": 3, "plum": 5}


class ShopEpisode:
    """Prices can be asked for; a sale is a state."""

    def __init__(self, task):
        self._task, self.sold = task, []
        self.tools = [schemas.tool_of(f) for f in (self.price, self.sell, self.crash)]

    def price(self, item: str) -> int:
        """Return what an item costs."""
        if item not in PRICES:
            raise ToolError(f"there is no {item}")
        return PRICES[item]

    def sell(self, item: str, n: int = 1) -> str:
        """Sell an item."""
        self.sold.append((item, n))
        return "sold"

    def crash(self) -> str:
        """Fail."""
        raise RuntimeError("out of paper")

    def grade(self, answer):
        right = answer == str(PRICES[self._task.data["item"]])
        return Grade(
            score=float(right), parts={"answer": float(right), "sold": float(bool(self.sold))}
        )


class Shop:
    """Implements `Environment`."""

    name = "shop"
    summary = "Prices."

    def __init__(self):
        self.opened = self.closed = 0

    def tasks(self, split, seed=0):
        for i, item in enumerate(PRICES):
            yield Task(
                name=f"{split}:{i}",
                environment="shop",
                prompt=f"What is a {item}?",
                data={"item": item},
            )

    @contextlib.contextmanager
    def open(self, task):
        self.opened += 1
        try:
            yield ShopEpisode(task)
        finally:
            self.closed += 1

    def solve(self, task, call):
        return str(call("price", item=task.data["item"]))


class Scripted(Engine):
    """Says what `script(prompt)` returns, a token a step for each request, up to the limits that an engine has."""

    def __init__(self, script, *, max_len=4096, n_slots=4):
        self.cfg = types.SimpleNamespace(max_len=max_len, n_slots=n_slots, keep_sets=False)
        self._script, self._requests, self._cancelled, self.prompts = script, {}, set(), []

    @property
    def has_work(self):
        return bool(self._requests)

    def submit(self, prompt, params):
        self.prompts.append(list(prompt))
        number = len(self.prompts)
        said = list(self._script(list(prompt)))
        room = min(params.max_tokens, self.cfg.max_len - len(prompt))
        self._requests[number] = (said[:room], "stop" if len(said) <= room else "length")
        return number

    def cancel(self, request):
        self._cancelled.add(request)

    def step(self):
        events = []
        for number, (left, reason) in list(self._requests.items()):
            if number in self._cancelled:
                events.append(FinishEvent(number, "cancelled", None))
                del self._requests[number]
                continue
            if left:
                events.append(TokenEvent(number, left.pop(0), -0.5, None))
            if not left:
                events.append(FinishEvent(number, reason, None))
                del self._requests[number]
        return events
