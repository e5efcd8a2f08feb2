"""Responses drawn by the generation engine, with all that the learner needs to see them as the sampler did."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from dsv32_jax.generate.engine import Engine
from dsv32_jax.generate.protocol import FinishEvent, FinishReason, TokenEvent
from dsv32_jax.generate.sampling import SamplingParams


class KeptSets(NamedTuple):
    """The tokens that each token of a response was drawn from, one set after the other.

    Attributes:
        tokens: int32 [M], ascending within a set.
        ends: int64 [O], where each set ends.
    """

    tokens: Int[np.ndarray, " M"]
    ends: Integer[np.ndarray, " O"]


@dataclass(frozen=True, eq=False)
class Rollout:
    """A prompt and a response to it, token by token: nothing of it is ever tokenised again.

    An episode of several turns is one too: results of tools stand among the tokens that were drawn, and where its
    context was begun anew, several contexts follow each other. Together they are one response with one reward.

    Attributes:
        tokens: int32 [N], the prompt, then the response; all contexts, one after the other.
        n_prompt: Tokens of the first prompt.
        log_p: float32 [O], the sampler's log-probability of each token that was drawn, under what it was drawn from.
        kept: What that was; None where every token was open.
        experts: [L, N, A], each token's experts in each expert layer, -1 for a context's last token; None if not kept.
        temperature: That the logits were divided by.
        reason: "stop" or "length".
        version: Of the weights, in updates of the learner.
        selection: [layers, N, K], positions of the keys that each token selected in each layer, ascending, then -1; -1
            for the last token; None if not kept. It is there to be compared, and no file keeps it.
        trainable: bool [N], which tokens were drawn; None for all after the prompt.
        starts: Where each context begins: none sees another.
        outcome: What a judge needs beside the tokens, such as an episode's trajectory; no file keeps it.
    """

    tokens: Int[np.ndarray, " N"]
    n_prompt: int
    log_p: Float[np.ndarray, " O"]
    kept: KeptSets | None
    experts: Integer[np.ndarray, "L N A"] | None
    temperature: float
    reason: FinishReason
    version: int
    selection: Integer[np.ndarray, "layers N K"] | None = None
    trainable: Bool[np.ndarray, " N"] | None = None
    starts: tuple[int, ...] = (0,)
    outcome: Any = None

    @property
    def places(self) -> Integer[np.ndarray, " O"]:
        """Where in `tokens` those stand that were drawn."""
        if self.trainable is None:
            return np.arange(self.n_prompt, len(self.tokens))
        return np.flatnonzero(self.trainable)

    @property
    def n_drawn(self) -> int:
        """Tokens that were drawn."""
        return len(self.log_p)

    @property
    def drawn(self) -> Int[np.ndarray, " O"]:
        """The tokens that were drawn."""
        return self.tokens[self.places]

    @property
    def response(self) -> Int[np.ndarray, " R"]:
        """All after the prompt."""
        return self.tokens[self.n_prompt :]

    @property
    def contexts(self) -> list[slice]:
        """Where in `tokens` each context stands."""
        bounds = [*self.starts, len(self.tokens)]
        return [slice(*pair) for pair in itertools.pairwise(bounds)]


@dataclass
class _Draft:
    """A response on its way."""

    prompt: Sequence[int]
    params: SamplingParams
    place: int
    tokens: list[int] = field(default_factory=list)
    log_p: list[float] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)


def sample(
    engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]], *, version: int
) -> Iterator[tuple[int, Rollout]]:
    """Draw a response to each request; those that end first come first.

    Args:
        engine: Idle, with `keep_sets` where tokens are cut by top-p or top-k.
        requests: Prompts and how to draw.
        version: Of the engine's weights, kept with the rollouts.

    Yields:
        (place in `requests`, its rollout).

    Raises:
        ValueError: If a prompt does not fit the engine, tokens are drawn greedily, or from kept sets that the engine
            does not report.
    """
    for _, params in requests:
        check_params(engine, params)
    drafts: dict[int, _Draft] = {}
    waiting = iter(enumerate(requests))
    more = True
    while more or engine.has_work:
        while more and len(drafts) - engine.n_running < engine.cfg.max_waiting:
            place, request = next(waiting, (-1, None))
            if request is None:
                more = False
                break
            drafts[engine.submit(*request)] = _Draft(*request, place)
        for event in engine.step():
            draft = drafts[event.request]
            if isinstance(event, TokenEvent):
                draft.tokens.append(event.token)
                draft.log_p.append(event.log_p)
                if event.kept is not None:
                    draft.kept.append(event.kept)
            else:
                yield draft.place, _finished(drafts.pop(event.request), event, version)


def check_params(engine: Engine, params: SamplingParams) -> None:
    """Refuse settings under which the sampler's probabilities would not be the policy's.

    Args:
        engine: That draws.
        params: How.

    Raises:
        ValueError: If there are such.
    """
    if params.temperature == 0:
        raise ValueError("temperature=0 draws greedily, which has no policy gradient")
    if (params.top_p < 1 or params.top_k > 0) and not engine.cfg.keep_sets:
        raise ValueError("top_p and top_k need keep_sets=True, or the learner's ratio is wrong")


def _finished(draft: _Draft, event: FinishEvent, version: int) -> Rollout:
    cut = draft.params.top_p < 1 or draft.params.top_k > 0
    kept = None
    if cut:
        ends = np.cumsum([len(ids) for ids in draft.kept])
        kept = KeptSets(np.concatenate(draft.kept).astype(np.int32), ends)
    return Rollout(
        tokens=np.asarray([*draft.prompt, *draft.tokens], np.int32),
        n_prompt=len(draft.prompt),
        log_p=np.asarray(draft.log_p, np.float32),
        kept=kept,
        experts=event.experts,
        temperature=draft.params.temperature,
        reason=event.reason,
        version=version,
        selection=event.selection,
    )
