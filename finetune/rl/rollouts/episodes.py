"""Samples of several turns, which the user's environment answers: ids in, ids out.

    reset     main rank     the environment begins; its prompt is rendered once
    turn      all ranks     each sample that goes on gets one more turn, cohort by cohort
    step      main rank     the environment reads the turns; its messages follow as ids, which nothing samples
    ...                     until it says so, `max_turns` or `max_new_tokens` ends a sample, or a call fails
    end       main rank     the environment's reward

    ids       1 872 198 13048 2 198 | 8122 2 | 198 1 14172 198 22 2 198 1 77091 198 | 22 2
              prompt                  turn 0   of the environment                     turn 1
    sampled                           yes yes                                         yes yes

No turn is tokenized again, and the template never sees its text (`data/chat/turns.py`). Which tokens are trained
follows from who wrote them. The noise of a token depends on its place in the whole sample, not on what is decoded with
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.checkpoints.inputs import on_main
from finetune.data.chat.turns import TurnRenderer
from finetune.data.formats.messages import context_of, read_messages
from finetune.data.formats.tools import read_tools
from finetune.data.samples import BadRow, Conversation, Message
from finetune.engine.base import Engine
from finetune.errors import UserError
from finetune.recipe import Recipe
from finetune.recipe.reward_settings import EnvironmentReward
from finetune.rl.rewards.completion import Outcome
from finetune.rl.rollouts.drawing import Beginning, Drawer, Drawn, Talk
from finetune.rl.rollouts.environment import LOG, EnvironmentCall, Environments
from finetune.rl.rollouts.prompts import PromptContent, RowPrompt, RunPrompts, message_dict
from finetune.rl.rollouts.records import Turns


@dataclass
class _Tokens:
    """A sample as every rank has it."""

    draw: int
    sample: int
    prompt: list[int]
    ids: list[int] = field(default_factory=list)  # after the prompt
    spans: list[tuple[int, int]] = field(default_factory=list)  # of the turns in `ids`
    log_probs: list[NDArray[np.float64]] = field(default_factory=list)  # of each turn
    margins: list[NDArray[np.float64]] = field(default_factory=list)
    is_over: bool = False


@dataclass
class Episode:
    """A sample as the main rank has it: what the environment did and read."""

    place: str  # in messages: "rows.jsonl:3, sample 2"
    number: int  # within the batch
    begin: dict[str, Any]  # arguments of `reset`
    seeds: list[str]
    prompt: Conversation
    prompt_ids: list[int]
    messages: list[Message] = field(default_factory=list)  # after the prompt
    read: list[dict[str, Any]] = field(default_factory=list)  # turns as `step` gets them
    ended: Literal["over", "max_turns", "max_new_tokens", "failed"] | None = None
    calls: int = 0
    malformed_calls: int = 0
    failure: Outcome | None = None
    outcome: Outcome | None = None

    def talk(self, spans: Sequence[tuple[int, int]]) -> Talk:
        """Returns the finished episode. spans: of its turns in the ids after the prompt."""
        assert self.ended is not None
        failure = self.failure and self.failure.kind
        turns = Turns(tuple(spans), self.ended, self.calls, self.malformed_calls, failure)
        messages = (*self.prompt.messages, *self.messages[:-1])
        return Talk(self.prompt_ids, tuple(map(message_dict, messages)), turns, self.outcome)

    def request(self, ends: bool = False) -> EnvironmentCall:
        return EnvironmentCall(self.number, self.begin, self.seeds, self.read, ends)


class Episodes:
    """Episodes of a recipe's environment, on the main rank: turns become requests, and replies become ids. A context
    manager, which starts and ends the environment's processes."""

    def __init__(self, recipe: Recipe, renderer: TurnRenderer, folder: Path | None):
        """folder: of the run, for the log of failures; None: no log."""
        assert recipe.rollouts is not None
        assert recipe.rollouts.environment is not None  # the caller's condition
        self._recipe, self._renderer, self._settings = recipe, renderer, recipe.rollouts.environment
        self._is_rewarded = any(isinstance(one, EnvironmentReward) for one in recipe.rewards)
        self._environments, self._folder = Environments(self._settings, self._is_rewarded, folder), folder
        self._room = recipe.data.max_length - recipe.rollouts.max_new_tokens  # of prompts

    def __enter__(self) -> Episodes:
        """Raises UserError for an environment that cannot be used, or a model without a chat template."""
        self._renderer.pattern  # noqa: B018 - raises
        self._environments.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._environments.__exit__()

    def reset(
        self, first_draw: int, prompts: Sequence[RowPrompt], contents: Sequence[PromptContent], each: int
    ) -> list[Episode]:
        """Returns `each` episodes of each prompt, begun. Raises UserError if the environment fails, or its prompt
        leaves no room: without a prompt there is nothing to train on."""
        episodes = []
        for i in range(len(prompts) * each):
            prompt, content, draw, sample = prompts[i // each], contents[i // each], first_draw + i // each, i % each
            assert content.conversation is not None  # `content_of` reads it
            seed = f"{self._recipe.run.seed}:{draw}"
            begin = {
                "row": dict(content.columns),
                "messages": list(content.messages),
                "reference": self._renderer.text(prompt.reference) if prompt.reference else None,
                "tools": [dict(tool) for tool in content.conversation.tools],
                "seed": int.from_bytes(
                    blake2b(seed.encode(), digest_size=4).digest(), "big"
                ),  # of all samples of the prompt
            }
            seeds = [seed, *(f"{seed}:{sample}:{turn}" for turn in range(self._settings.max_turns))]
            place = f"{prompt.path}:{prompt.row}, sample {sample}"
            episodes.append(Episode(place, i, begin, seeds, content.conversation, prompt.ids))
        replies = self._environments.replies([episode.request() for episode in episodes])
        for episode, reply in zip(episodes, replies, strict=True):
            try:
                if isinstance(reply, Outcome):
                    raise BadRow(reply.what)
                self._begin(episode, reply)
            except BadRow as reason:
                told = reply if isinstance(reply, Outcome) else Outcome(None, "refused", str(reason))
                raise UserError(self._stopped(episode, told)) from None
        return episodes

    def _begin(self, episode: Episode, reply: dict[str, Any]) -> None:
        """Sets the prompt that the environment returned, if it did. Raises BadRow."""
        messages, tools = reply["messages"], reply["tools"]
        if messages is None and tools is None:
            return
        read = episode.prompt.messages if messages is None else tuple(read_messages(messages, "messages"))
        if read[-1].role not in ("user", "tool"):
            raise BadRow(f"its prompt ends with a message from {read[-1].role}, after which nothing is to be answered")
        given = episode.prompt.tools if tools is None else read_tools(tools)
        context = context_of(read, tools=given)
        arguments = episode.prompt.template_arguments
        episode.prompt = Conversation(context.messages, context.tools, arguments)
        episode.prompt_ids = self._renderer.prompt(episode.prompt)
        if len(episode.prompt_ids) > self._room:
            raise BadRow(
                f"its prompt has {len(episode.prompt_ids)} tokens, and rollouts.max_new_tokens leaves {self._room} of "
                "data.max_length"
            )

    def step(
        self, episodes: Sequence[Episode], turns: Sequence[list[int]], rooms: Sequence[int]
    ) -> list[list[int] | None]:
        """Returns the ids that follow each turn; None if the sample is over. turns: sampled ids; rooms: tokens that may
        follow. Raises UserError under `on_failure: stop`."""
        waiting = []
        for episode, ids in zip(episodes, turns, strict=True):
            message, malformed = self._renderer.read(ids)
            calls = [dict(call["function"]) for call in message.tool_calls]
            episode.messages.append(message)
            episode.calls += len(calls)
            episode.malformed_calls += malformed
            if ids[-1] not in self._renderer.end_ids:
                episode.ended = "max_new_tokens"
                continue
            episode.read.append({"text": self._renderer.text(ids), "calls": calls})
            waiting.append(episode)
        answers = self._environments.replies([episode.request() for episode in waiting])
        replies = {episode.number: answer for episode, answer in zip(waiting, answers, strict=True)}
        following: list[list[int] | None] = []
        for episode, room in zip(episodes, rooms, strict=True):
            reply = replies.get(episode.number)
            following.append(None if reply is None else self._following(episode, reply, room))
        return following

    def _following(self, episode: Episode, reply: dict[str, Any] | Outcome, room: int) -> list[int] | None:
        if isinstance(reply, Outcome):
            return self._failed(episode, reply)
        if reply["messages"] is None or len(episode.read) == self._settings.max_turns:
            episode.ended = "over" if reply["messages"] is None else "max_turns"
            return None
        try:
            added = read_messages(reply["messages"], "messages")
            if wrong := next((one.role for one in added if one.role not in ("user", "tool")), None):
                raise BadRow(f"step returned a message from {wrong}; expected messages from user or tool")
            turns = [*episode.messages, *added]
            context_of([*episode.prompt.messages, *turns])
            ids = self._renderer.after(episode.prompt, turns)
        except BadRow as reason:
            return self._failed(episode, Outcome(None, "refused", str(reason)))
        if len(ids) >= room:
            episode.ended = "max_new_tokens"  # without them: nothing would follow
            return None
        episode.messages = turns
        return ids

    def _failed(self, episode: Episode, failure: Outcome) -> None:
        """Ends an episode. Raises UserError under `on_failure: stop`."""
        if self._settings.on_failure == "stop":
            raise UserError(self._stopped(episode, failure))
        self._environments.tell(f"{episode.place}, turn {len(episode.read)}", failure)
        episode.ended, episode.failure = "failed", failure

    def _stopped(self, episode: Episode, failure: Outcome) -> str:
        """Returns the message of a failure that stops the run."""
        call = f"turn {len(episode.read)}" if episode.read else "reset"
        self._environments.tell(f"{episode.place}, {call}", failure)
        log = f". Traceback and output are in {self._folder / LOG}" if self._folder and failure.details else ""
        hint = "or set `on_failure: end`, which ends such a sample" if episode.read else "or take the row out"
        return (
            f"rollouts.environment: {episode.place}, {call}: {failure.what}{log}. Fix: correct the environment, {hint}"
        )

    def end(self, episodes: Sequence[Episode]) -> None:
        """Ends the episodes, and sets their rewards."""
        left = [episode for episode in episodes if episode.failure is None]
        replies = self._environments.replies([episode.request(ends=True) for episode in left])
        for episode, reply in zip(left, replies, strict=True):
            if self._is_rewarded:
                episode.outcome = reply if isinstance(reply, Outcome) else Outcome(reply["value"])
        for episode in episodes:
            if episode.failure is not None and self._is_rewarded:
                episode.outcome = episode.failure


@dataclass(frozen=True)
class EpisodeDrawer:
    """Draws samples of several turns from the model as it is."""

    engine: Engine
    drawer: Drawer
    episodes: Episodes  # started on the main rank

    def draw(self, first_draw: int, source: RunPrompts, prompts: Sequence[RowPrompt], each: int) -> list[Drawn]:
        """Returns `each` samples of each prompt, prompt after prompt, on every rank; their talks on the main rank.
        Collective. Raises UserError.

        first_draw: number of the first prompt's draw in the run; source: of the prompts' rows.
        """
        begun: list[Episode] = []  # on the main rank

        def reset() -> list[list[int]]:
            begun.extend(self.episodes.reset(first_draw, prompts, source.contents(prompts), each))
            return [episode.prompt_ids for episode in begun]

        prompt_ids = on_main(self.engine, reset)
        samples = [_Tokens(first_draw + i // each, i % each, ids) for i, ids in enumerate(prompt_ids)]
        most = self.drawer.settings.max_new_tokens
        while going := [i for i, one in enumerate(samples) if not one.is_over]:
            tokens = [samples[i] for i in going]
            drawn = self.drawer.turns(
                [
                    Beginning(one.draw, one.sample, [*one.prompt, *one.ids], len(one.ids), most - len(one.ids))
                    for one in tokens
                ]
            )
            for one, turn in zip(tokens, drawn, strict=True):
                one.spans.append((len(one.ids), len(one.ids) + len(turn.ids)))
                one.ids += turn.ids
                one.log_probs.append(turn.log_probs)
                one.margins.append(turn.margins)
            rooms = [most - len(one.ids) for one in tokens]
            talking = [begun[i] for i in going] if begun else []
            step = partial(self.episodes.step, talking, [turn.ids for turn in drawn], rooms)
            for one, following in zip(tokens, on_main(self.engine, step), strict=True):
                one.ids += following or []
                one.is_over = following is None
        on_main(self.engine, lambda: self.episodes.end(begun))
        talks = [episode.talk(one.spans) for episode, one in zip(begun, samples, strict=True)] if begun else []
        return [
            Drawn(one.ids, np.concatenate(one.log_probs), np.concatenate(one.margins), talks[i] if talks else None)
            for i, one in enumerate(samples)
        ]
